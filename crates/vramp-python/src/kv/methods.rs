//! What Python calls of an arena for caches, and the pages of its arguments.

use std::ops::Range;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyInt, PyList, PyRange};
use vramp_alloc::Bytes;
use vramp_alloc::kv::{Arrangement, Layout, Options};

use super::{KvArena, Part};
use crate::arguments::{amount, bytes};
use crate::array::Array;
use crate::calls::id_of;
use crate::error::{not_pickled, refuse, result};
use crate::owner::Owner;
use crate::pool::Pool;
use crate::python;
use crate::stream::stream_in;

fn page_number(py: Python<'_>, number: &Bound<'_, PyAny>) -> PyResult<u32> {
    number.extract::<u32>().map_err(|_| {
        refuse(py, "RangeError", &format!("{number} is no page: they are counted from 0"))
    })
}

fn push(ranges: &mut Vec<Range<u32>>, pages: Range<u32>) {
    match ranges.last_mut() {
        Some(last) if last.end == pages.start && !pages.is_empty() => last.end = pages.end,
        _ => ranges.push(pages),
    }
}

/// Adds the pages of a number, a range, or an iterable of both.
fn add_pages(ranges: &mut Vec<Range<u32>>, pages: &Bound<'_, PyAny>) -> PyResult<bool> {
    let py = pages.py();
    if pages.is_instance_of::<PyInt>() {
        let page = page_number(py, pages)?;
        push(ranges, page..page.saturating_add(1));
        return Ok(true);
    }
    let Ok(range) = pages.cast::<PyRange>() else { return Ok(false) };
    let bound = |name| range.getattr(name).and_then(|number| page_number(py, &number));
    let (start, stop) = (bound("start")?, bound("stop")?);
    if range.getattr("step")?.extract::<i64>()? == 1 {
        push(ranges, start..stop.max(start));
        return Ok(true);
    }
    for page in range.try_iter()? {
        add_pages(ranges, &page?)?;
    }
    Ok(true)
}

/// Returns the pages that an argument names, neighbours together.
fn page_ranges(pages: &Bound<'_, PyAny>) -> PyResult<Vec<Range<u32>>> {
    let mut ranges = Vec::new();
    if add_pages(&mut ranges, pages)? {
        return Ok(ranges);
    }
    let wrong = |found: &Bound<'_, PyAny>| {
        PyTypeError::new_err(format!(
            "pages are an int, a range or an iterable of them, and not {}",
            found.get_type()
        ))
    };
    for page in python::elements(pages).map_err(|_| wrong(pages))? {
        if !add_pages(&mut ranges, &page)? {
            return Err(wrong(&page));
        }
    }
    Ok(ranges)
}

fn to_python<'py>(py: Python<'py>, ranges: &[Range<u32>]) -> PyResult<Bound<'py, PyList>> {
    let made: Result<Vec<_>, _> = ranges
        .iter()
        .map(|range| PyRange::new(py, range.start as isize, range.end as isize))
        .collect();
    PyList::new(py, made?)
}

#[pymethods]
impl KvArena {
    /// Reserves the addresses.
    #[new]
    #[pyo3(signature = (pool, *, tensors, size, page, superpage, layout, limit, ahead))]
    #[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
    fn new(
        pool: &Bound<'_, Pool>,
        tensors: &Bound<'_, PyAny>,
        size: &Bound<'_, PyAny>,
        page: &Bound<'_, PyAny>,
        superpage: &Bound<'_, PyAny>,
        layout: &str,
        limit: Option<&Bound<'_, PyAny>>,
        ahead: &Bound<'_, PyAny>,
    ) -> PyResult<KvArena> {
        let py = pool.py();
        let arrangement = match layout {
            "separate" => Arrangement::Separate,
            "interleaved" => Arrangement::Interleaved,
            other => {
                let text = format!("layout is \"separate\" or \"interleaved\", and not {other:?}");
                return Err(refuse(py, "OptionError", &text));
            }
        };
        let tensors = tensors.extract::<u32>().map_err(|_| {
            refuse(py, "RangeError", &format!("tensors is {tensors}: use 1 to 2**32 - 1"))
        })?;
        let layout = Layout {
            tensors,
            bytes_each: Bytes::new(amount(py, size, "size")?),
            page: Bytes::new(amount(py, page, "page")?),
            arrangement,
        };
        let limit = limit.map(|limit| amount(py, limit, "limit")).transpose()?;
        let options = Options {
            superpage: Bytes::new(amount(py, superpage, "superpage")?),
            limit: limit.map(Bytes::new),
            ahead: Bytes::new(amount(py, ahead, "ahead")?),
        };
        KvArena::reserve(pool, layout, options)
    }

    /// The pool of its memory.
    #[getter(pool)]
    fn owner(&self, py: Python<'_>) -> Py<Pool> {
        self.pool.clone_ref(py)
    }

    /// Number of tensors.
    #[getter]
    fn tensors(&self) -> u32 {
        self.layout.tensors
    }

    /// Pages of each tensor.
    #[getter(pages)]
    fn page_count(&self) -> u32 {
        self.pages
    }

    /// Bytes of a page of a tensor.
    #[getter]
    fn page(&self) -> u64 {
        self.layout.page.count()
    }

    /// How the tensors lie.
    #[getter]
    fn layout(&self) -> &'static str {
        match self.layout.arrangement {
            Arrangement::Separate => "separate",
            Arrangement::Interleaved => "interleaved",
        }
    }

    /// Address of the first tensor.
    #[getter]
    fn ptr(&self) -> u64 {
        self.addr
    }

    /// Bytes of all its addresses.
    #[getter(size)]
    fn whole_size(&self) -> u64 {
        self.size
    }

    /// Most bytes that it may have, parked pages included.
    #[getter]
    fn limit(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        let stats = self.call(py, |_, arena| Ok(arena.stats()))?;
        Ok(stats.limit.map(|limit| limit.count()))
    }

    #[setter(limit)]
    fn set_limit(&self, py: Python<'_>, limit: Option<Bound<'_, PyAny>>) -> PyResult<()> {
        let limit = limit.map(|limit| amount(py, &limit, "limit")).transpose()?;
        self.call(py, |_, arena| Ok(arena.set_limit(limit.map(Bytes::new))?))
    }

    /// Gives pages memory.
    #[pyo3(signature = (pages, stream = None))]
    fn commit(
        &self,
        py: Python<'_>,
        pages: &Bound<'_, PyAny>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let pages = page_ranges(pages)?;
        self.call_on(py, stream, |session, arena, stream| session.kv_commit(arena, &pages, stream))
    }

    /// Commits pages of the arena's choice.
    #[pyo3(signature = (count, stream = None))]
    fn take<'py>(
        &self,
        py: Python<'py>,
        count: &Bound<'_, PyAny>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Bound<'py, PyList>> {
        let count = count.extract::<u32>().map_err(|_| {
            refuse(py, "RangeError", &format!("count is {count}: use a number of pages"))
        })?;
        let taken = self
            .call_on(py, stream, |session, arena, stream| session.kv_take(arena, count, stream))?;
        to_python(py, &taken)
    }

    /// Gives up pages.
    #[pyo3(signature = (pages, stream = None))]
    fn park(
        &self,
        py: Python<'_>,
        pages: &Bound<'_, PyAny>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let pages = page_ranges(pages)?;
        self.call_on(py, stream, |session, arena, stream| session.kv_park(arena, &pages, stream))
    }

    /// Returns parked pages to the card.
    #[pyo3(signature = (keep = None))]
    fn release(&self, py: Python<'_>, keep: Option<&Bound<'_, PyAny>>) -> PyResult<u64> {
        let keep = keep.map_or(Ok(0), |keep| amount(py, keep, "keep"))?;
        self.call(py, |_, arena| Ok(arena.release(Bytes::new(keep))?.count()))
    }

    /// Committed pages that are best given up.
    fn park_first<'py>(&self, py: Python<'py>, count: u32) -> PyResult<Bound<'py, PyList>> {
        let pages = self.call(py, |_, arena| Ok(arena.park_first(count)))?;
        to_python(py, &pages)
    }

    /// Number of pages that a commit could have now.
    fn available(&self, py: Python<'_>) -> PyResult<u32> {
        self.call(py, |_, arena| Ok(arena.available()))
    }

    /// What it has.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let stats = self.call(py, |_, arena| Ok(arena.stats()))?;
        let fields = PyDict::new(py);
        fields.set_item("pages", stats.pages)?;
        fields.set_item("committed", stats.committed)?;
        fields.set_item("parked", stats.parked)?;
        fields.set_item("moving", stats.moving)?;
        fields.set_item("page_bytes", stats.page_bytes.count())?;
        fields.set_item("limit", stats.limit.map(Bytes::count))?;
        result(py, "KvStats", &fields)
    }

    /// Records that work queued on a stream so far uses the memory.
    #[pyo3(name = "record_use", signature = (stream = None))]
    fn note_use(&self, py: Python<'_>, stream: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let name = stream_in(self.pool.bind(py), stream)?.name;
        self.call(py, |session, arena| {
            arena.record_use(id_of(session, name)?);
            Ok(())
        })
    }

    /// Returns an array in its addresses: of `size` bytes from `offset` on.
    #[pyo3(signature = (shape = None, dtype = None, *, offset = None, size = None))]
    fn view(
        slf: &Bound<'_, KvArena>,
        shape: Option<&Bound<'_, PyAny>>,
        dtype: Option<&Bound<'_, PyAny>>,
        offset: Option<&Bound<'_, PyAny>>,
        size: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Array> {
        let (py, own) = (slf.py(), slf.get());
        let offset = offset.map_or(Ok(0), |offset| bytes(py, offset, "offset"))?;
        let rest = own.size.saturating_sub(offset);
        let size = size.map_or(Ok(rest), |size| bytes(py, size, "size"))?;
        if offset > own.size || size > rest {
            let text = format!(
                "{size} bytes from byte {offset} on are beyond the {} bytes of the arena",
                own.size
            );
            return Err(refuse(py, "RangeError", &text));
        }
        let part = Part { arena: slf.clone().unbind(), addr: own.addr + offset, size };
        Array::new(py, Owner::Cache(part), shape, dtype, 0)
    }

    /// Ends the arena.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.end(py)
    }

    /// True once it was closed.
    #[getter]
    fn is_closed(&self) -> bool {
        self.exports.is_closed()
    }

    fn __enter__<'py>(slf: Bound<'py, KvArena>) -> Bound<'py, KvArena> {
        slf
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        kind: &Bound<'_, PyAny>,
        _error: &Bound<'_, PyAny>,
        _trace: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let ended = self.end(py);
        // An exception of the block is not replaced. The last reference ends the arena then.
        if kind.is_none() { ended } else { Ok(()) }
    }

    /// Refuses to be pickled.
    fn __reduce__(&self) -> PyResult<()> {
        Err(not_pickled("kv.Arena"))
    }

    fn __repr__(&self) -> String {
        let Layout { tensors, page, .. } = self.layout;
        match self.is_closed() {
            true => format!("<vramp.kv.Arena of {tensors} tensors, closed>"),
            false => format!(
                "<vramp.kv.Arena of {tensors} tensors, {} pages of {page} each, at {:#x}>",
                self.pages, self.addr
            ),
        }
    }
}
