//! Where the pages of the tensors lie.
//!
//! The addresses are cut into *cells*: an arena of the pool for each. What the pool does to an arena costs
//! O(its parts), so a cell has few pages. The pages that share a row of cells are a *block*.

use std::ops::Range;

use vramp_core::Bytes;

/// How the tensors of an arena lie in its addresses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Arrangement {
    /// One tensor behind the other, each contiguous: what most kernels want. A page costs a driver call of
    /// each kind for each tensor, fewer where neighbours are committed together.
    #[default]
    Separate,
    /// The same page of all tensors side by side: page `p` of tensor `t` begins at
    /// `(p * tensors + t) * page`. A page of all tensors is one handle.
    Interleaved,
}

/// The tensors of an arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Number of tensors, which are committed together: those of all layers, keys and values.
    pub tensors: u32,
    /// Length of each, rounded up to whole pages.
    pub bytes_each: Bytes,
    /// What is committed at once of each tensor: a multiple of the device's page (2 MiB).
    pub page: Bytes,
    /// Where they lie.
    pub arrangement: Arrangement,
}

/// A layout cut into cells.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Geometry {
    /// Pages of each tensor.
    pub pages: u32,
    /// Cells of a block.
    pub columns: u32,
    /// Pages of a block; the last one may have fewer. A multiple of the next.
    pub per_block: u32,
    /// Pages of the longest handle.
    pub per_handle: u32,
    /// Bytes of one page in a cell.
    pub unit: Bytes,
    /// Length of new handles.
    pub handle: Bytes,
}

/// A run of pages within one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub block: u32,
    /// First page, counted from the block's start.
    pub first: u32,
    pub pages: u32,
}

impl Geometry {
    /// Pages of a handle at most, so that the arenas of the pool stay short.
    const PAGES_MAX: u32 = 64;

    /// Pages of a block at least, so that they are not many.
    const PAGES_MIN: u32 = 16;

    pub fn new(layout: &Layout, pages: u32, superpage: Bytes) -> Geometry {
        let Layout { tensors, page, .. } = *layout;
        let (columns, unit) = match layout.arrangement {
            Arrangement::Separate => (tensors, page),
            Arrangement::Interleaved => (1, page * u64::from(tensors)),
        };
        let whole = superpage.count() / unit.count();
        let per_handle = u32::try_from(whole).unwrap_or(u32::MAX).clamp(1, Self::PAGES_MAX);
        let per_block = per_handle * Self::PAGES_MIN.div_ceil(per_handle);
        let handle = unit * u64::from(per_handle);
        Geometry { pages, columns, per_block, per_handle, unit, handle }
    }

    /// Number of blocks.
    pub fn blocks(&self) -> u32 {
        self.pages.div_ceil(self.per_block)
    }

    /// Bytes of one page in all tensors.
    pub fn page_bytes(&self) -> Bytes {
        self.unit * u64::from(self.columns)
    }

    /// Bytes of a column's addresses.
    pub fn column(&self) -> Bytes {
        self.unit * u64::from(self.pages)
    }

    /// Bytes of a cell of a block.
    pub fn cell(&self, block: u32) -> Bytes {
        self.unit * u64::from(self.pages_of(block).len() as u32)
    }

    /// The cells of a block, as indices into the list of all.
    pub fn cells_of(&self, block: u32) -> Range<usize> {
        let first = block as usize * self.columns as usize;
        first..first + self.columns as usize
    }

    /// The pages of a block.
    pub fn pages_of(&self, block: u32) -> Range<u32> {
        let first = block * self.per_block;
        first..(first + self.per_block).min(self.pages)
    }

    /// The pages that may share a handle with a page.
    pub fn group_of(&self, page: u32) -> Range<u32> {
        let first = page - page % self.per_handle;
        first..(first + self.per_handle).min(self.pages)
    }

    /// Bytes of a run in a cell: offset and length.
    pub fn part(&self, run: Run) -> (Bytes, Bytes) {
        (self.unit * u64::from(run.first), self.unit * u64::from(run.pages))
    }

    /// Cuts pages at the ends of blocks.
    pub fn runs(&self, pages: Range<u32>) -> impl Iterator<Item = Run> {
        let per_block = self.per_block;
        let mut next = pages.start;
        std::iter::from_fn(move || {
            let left = pages.end.checked_sub(next).filter(|&left| left > 0)?;
            let (block, first) = (next / per_block, next % per_block);
            let run = Run { block, first, pages: left.min(per_block - first) };
            next += run.pages;
            Some(run)
        })
    }
}
