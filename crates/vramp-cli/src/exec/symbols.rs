//! Names of the functions in files of code: by their debug information, or else by their symbols.

use std::collections::HashMap;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use addr2line::Context;
use gimli::{EndianArcSlice, RunTimeEndian};
use object::read::ReadCache;
use object::read::elf::ElfFile64;
use object::{Object, ObjectSection, ObjectSymbol, SymbolKind};
use vramp_trace::spool::{FrameText, Module};

type Reader = EndianArcSlice<RunTimeEndian>;

/// More debug information than this, in bytes, is not read.
const DEBUG_MAX: u64 = 1 << 30;

/// The files that were looked at.
#[derive(Default)]
pub(super) struct Symbols(HashMap<String, Option<Code>>);

impl Symbols {
    /// Returns the frames of an address, innermost first, as [`vramp_trace::spool::Recording::to_trace`] asks
    /// for them.
    pub fn frames(&mut self, pc: u64, module: Option<(&Module, u64)>) -> Vec<FrameText> {
        let found = module.and_then(|(module, address)| {
            let code = self.0.entry(module.path.clone());
            let code = code.or_insert_with(|| Code::read(Path::new(&module.path))).as_ref()?;
            let by_lines = code.by_lines(address, &module.path).filter(|frames| !frames.is_empty());
            by_lines.or_else(|| Some(vec![code.by_symbols(address, &module.path)?]))
        });
        found.unwrap_or_else(|| vec![FrameText::unknown(pc, module)])
    }
}

/// What a file of code says about its functions.
struct Code {
    /// Sorted by address; without those that overlap.
    functions: Vec<Function>,
    lines: Option<Context<Reader>>,
}

struct Function {
    address: u64,
    size: u64,
    name: String,
}

impl Code {
    fn read(path: &Path) -> Option<Code> {
        let cache = ReadCache::new(File::open(path).ok()?);
        let file = ElfFile64::<object::Endianness, _>::parse(&cache).ok()?;
        Some(Code { functions: functions(&file), lines: lines(&file) })
    }

    fn by_lines(&self, address: u64, path: &str) -> Option<Vec<FrameText>> {
        let found = self.lines.as_ref()?.find_frames(address).skip_all_loads();
        let mut found = found.ok()?;
        let mut frames = Vec::new();
        while let Ok(Some(frame)) = found.next() {
            let name = frame.function.as_ref().and_then(|it| Some(demangled(&it.raw_name().ok()?)));
            let Some(name) = name.or_else(|| Some(self.by_symbols(address, path)?.name)) else {
                continue;
            };
            let place = frame.location.as_ref();
            let filename = place.and_then(|it| it.file).unwrap_or(path).to_owned();
            let line = place.and_then(|it| it.line).unwrap_or(0);
            frames.push(FrameText { name, filename, line });
        }
        Some(frames)
    }

    fn by_symbols(&self, address: u64, path: &str) -> Option<FrameText> {
        let after = self.functions.partition_point(|function| function.address <= address);
        let function = self.functions.get(after.checked_sub(1)?)?;
        // Beyond it is a function whose name was stripped.
        (address - function.address < function.size).then(|| FrameText {
            name: demangled(&function.name),
            filename: path.to_owned(),
            line: 0,
        })
    }
}

fn functions<'data>(file: &impl Object<'data>) -> Vec<Function> {
    let symbols = file.symbols().chain(file.dynamic_symbols());
    let defined = symbols.filter(|it| it.is_definition() && it.kind() == SymbolKind::Text);
    let mut functions: Vec<Function> = defined
        .filter_map(|symbol| {
            let name = symbol.name().ok()?.to_owned();
            Some(Function { address: symbol.address(), size: symbol.size(), name })
        })
        .filter(|function| function.size > 0)
        .collect();
    functions.sort_by_key(|function| function.address);
    functions.dedup_by_key(|function| function.address);
    functions
}

/// Reads the debug information. None if there is none, if it is compressed, or too large.
fn lines<'data>(file: &impl Object<'data>) -> Option<Context<Reader>> {
    let endian = match file.is_little_endian() {
        true => RunTimeEndian::Little,
        false => RunTimeEndian::Big,
    };
    let debug =
        file.sections().filter(|it| it.name().is_ok_and(|name| name.starts_with(".debug_")));
    let bytes: u64 = debug.map(|section| section.size()).sum();
    if bytes == 0 || bytes > DEBUG_MAX {
        return None;
    }
    let load = |id: gimli::SectionId| -> Result<Reader, object::Error> {
        let section = file.section_by_name(id.name());
        let data = section.map(|section| section.uncompressed_data()).transpose()?;
        Ok(EndianArcSlice::new(Arc::from(&*data.unwrap_or_default()), endian))
    };
    Context::from_dwarf(gimli::Dwarf::load(load).ok()?).ok()
}

/// Returns a name as it is in the source, without types of arguments.
fn demangled(name: &str) -> String {
    if let Ok(rust) = rustc_demangle::try_demangle(name) {
        return format!("{rust:#}");
    }
    let options = cpp_demangle::DemangleOptions::new().no_params().no_return_type();
    let cpp = cpp_demangle::Symbol::new(name).ok();
    let cpp = cpp.and_then(|symbol| symbol.demangle_with_options(&options).ok());
    cpp.unwrap_or_else(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_source() {
        for (mangled, name) in [
            ("main", "main"),
            (
                "_ZN3rmm2mr18cuda_async_mr_test5allocEmN4cuda10stream_refE",
                "rmm::mr::cuda_async_mr_test::alloc",
            ),
            ("_Znwm", "operator new"),
            ("_RNvCs1234_7mycrate4main", "mycrate::main"),
            ("_ZN4core3fmt5write17h0123456789abcdefE", "core::fmt::write"),
            ("_Znot_a_name", "_Znot_a_name"),
        ] {
            assert_eq!(demangled(mangled), name);
        }
    }

    #[test]
    fn this_program_knows_its_own_functions() {
        let path = std::env::current_exe().unwrap();
        let code = Code::read(&path).unwrap();
        let own = code.functions.iter().find(|it| it.name.contains("this_program_knows")).unwrap();
        let frame = code.by_symbols(own.address + own.size - 1, "program").unwrap();
        assert!(frame.name.contains("symbols::tests::this_program_knows"), "{}", frame.name);
        let module = Module { bias: 0, start: 0, end: 0, path: path.to_str().unwrap().to_owned() };
        let mut symbols = Symbols::default();
        let address = own.address + 1;
        assert!(symbols.frames(address, Some((&module, address)))[0].name.contains("this_program"));
        let nowhere = symbols.frames(1, Some((&module, 1)));
        assert_eq!((nowhere[0].name.as_str(), nowhere.len()), ("+0x1", 1));
        assert_eq!(symbols.frames(0x10, None)[0].name, "0x10");
    }
}
