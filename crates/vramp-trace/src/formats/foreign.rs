//! Recognizes files that are no traces, so that an error says what they are and what to do.

use std::path::Path;

use crate::ReadError;

/// Bytes by which files are recognized.
pub(crate) const LOOKED_AT: usize = 4 << 10;

/// A kind of file that is no trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Foreign {
    looks: &'static str,
    advice: &'static str,
}

impl From<Foreign> for ReadError {
    fn from(Foreign { looks, advice }: Foreign) -> ReadError {
        ReadError::NotATrace { looks, advice }
    }
}

const RECORD: &str = "record a snapshot with torch.cuda.memory._record_memory_history() and \
     torch.cuda.memory._dump_snapshot(\"snapshot.pickle\")";
const UNPACK: &str = "unpack it and give the trace in it";

/// Kinds by their first bytes. The first that matches counts.
const BY_START: &[(&[u8], Foreign)] = &[
    (
        b"version https://git-lfs.github.com/spec/",
        Foreign {
            looks: "a Git LFS pointer, which stands for a file that was not downloaded",
            advice: "run `git lfs pull` in its repository",
        },
    ),
    // The magic number of torch.save before zip archives, as a pickled integer.
    (b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19", Foreign::CHECKPOINT),
    (b"\x93NUMPY", Foreign::NUMPY),
    (
        b"SQLite format 3\0",
        Foreign {
            looks: "an SQLite database, as Nsight Systems exports",
            advice: "it has no trace of the allocator that can be read; record a snapshot with \
                     torch.cuda.memory._record_memory_history()",
        },
    ),
    (
        b"memray",
        Foreign { looks: "a recording of memray, which is about host memory", advice: RECORD },
    ),
    (b"BZh", Foreign { looks: "a bzip2 file", advice: UNPACK }),
    (b"\x04\x22\x4d\x18", Foreign { looks: "an lz4 file", advice: UNPACK }),
    (b"7z\xbc\xaf\x27\x1c", Foreign { looks: "a 7z archive", advice: UNPACK }),
    (
        b"\x1f",
        Foreign {
            looks: "the first byte of a gzip file",
            advice: "it is truncated; copy or download it again",
        },
    ),
];

impl Foreign {
    pub const LOCKED_ZIP: Foreign =
        Foreign { looks: "a zip archive whose file is encrypted", advice: UNPACK };
    pub const OTHER_ZIP: Foreign = Foreign {
        looks: "a zip archive whose file is compressed by neither deflate nor zstd",
        advice: UNPACK,
    };
    pub const BYTES_BEHIND: Foreign = Foreign {
        looks: "a gzip file with other bytes behind its end",
        advice: "cut them off, or copy or download it again",
    };
    const OLD_PICKLE: Foreign = Foreign {
        looks: "a pickle of protocol 1",
        advice: "write it again in Python with pickle.dump(snapshot, file, protocol=4)",
    };
    const CHECKPOINT: Foreign = Foreign {
        looks: "a PyTorch checkpoint (torch.save), not a memory snapshot",
        advice: RECORD,
    };
    const NUMPY: Foreign = Foreign { looks: "a NumPy file, not a recording", advice: RECORD };
    const NSIGHT: Foreign = Foreign {
        looks: "a report of Nsight, which has no trace of the allocator that can be read",
        advice: RECORD,
    };
    const FOLDER: Foreign = Foreign { looks: "a folder", advice: "give the traces in it" };

    /// Recognizes what a file is by its first bytes.
    pub fn of(start: &[u8]) -> Option<Foreign> {
        // Of a file of one byte nothing more is known.
        let by_start = |(magic, _): &&(&[u8], Foreign)| match magic {
            [_] => start == *magic,
            magic => start.starts_with(magic),
        };
        BY_START
            .iter()
            .find(by_start)
            .map(|&(_, foreign)| foreign)
            .or_else(|| elf(start))
            .or_else(|| tar(start))
            .or_else(|| safetensors(start))
            .or_else(|| pickle_of_protocol_1(start))
            .or_else(|| text(start))
    }

    /// Recognizes an archive that another program wrote by the name of a file in it.
    pub fn of_zip_entry(name: &str) -> Option<Foreign> {
        match name {
            _ if name == "data.pkl" || name.ends_with("/data.pkl") => Some(Foreign::CHECKPOINT),
            _ if name.ends_with(".npy") => Some(Foreign::NUMPY),
            _ => None,
        }
    }

    /// Recognizes a folder, or a file by the ending of its name if its contents say nothing.
    pub fn of_path(path: &Path) -> Option<Foreign> {
        let ending = path.extension().unwrap_or_default().to_string_lossy();
        match &*ending {
            _ if path.is_dir() => Some(Foreign::FOLDER),
            "nsys-rep" | "qdrep" | "ncu-rep" => Some(Foreign::NSIGHT),
            _ => None,
        }
    }
}

fn elf(start: &[u8]) -> Option<Foreign> {
    const CORE: u8 = 4;
    const CUDA: u8 = 190;
    if !start.starts_with(b"\x7fELF") {
        return None;
    }
    let kind = (start.get(16) == Some(&CORE), start.get(18) == Some(&CUDA));
    let looks = match kind {
        (true, true) => "a CUDA core dump",
        (true, false) => "the core dump of a process",
        (false, true) => "a CUDA binary",
        (false, false) => "a program or library (ELF)",
    };
    Some(Foreign { looks, advice: RECORD })
}

fn tar(start: &[u8]) -> Option<Foreign> {
    let is_tar = start.get(257..262) == Some(b"ustar");
    is_tar.then_some(Foreign { looks: "a tar archive", advice: UNPACK })
}

/// The length of a JSON header, then the header.
fn safetensors(start: &[u8]) -> Option<Foreign> {
    let (len, header) = start.split_first_chunk::<8>()?;
    let is_header = header.starts_with(b"{\"") && u64::from_le_bytes(*len) < 100_000_000;
    is_header.then_some(Foreign { looks: "a safetensors file with weights", advice: RECORD })
}

fn text(start: &[u8]) -> Option<Foreign> {
    // A character may be cut at the end.
    let text = match std::str::from_utf8(start) {
        Ok(text) => text,
        Err(error) if start.len() - error.valid_up_to() < 4 => {
            std::str::from_utf8(&start[..error.valid_up_to()]).unwrap_or_default()
        }
        Err(_) => return None,
    };
    let text = text.trim_start();
    if text.is_empty() || text.contains(|c: char| c.is_control() && !c.is_whitespace()) {
        return None;
    }
    let has_any = |words: &[&str]| words.iter().any(|word| text.contains(word));
    let (looks, advice) = if text.starts_with(['{', '[']) {
        if has_any(&["\"traceEvents\"", "\"ph\"", "\"deviceProperties\"", "\"schemaVersion\""]) {
            ("a Chrome trace, as torch.profiler writes, which has no allocations to replay", RECORD)
        } else {
            ("a JSON file, not a recording", RECORD)
        }
    } else if text.starts_with('<') {
        (
            "a web page, as a download that failed or a saved page of pytorch.org/memory_viz",
            "give the .pickle file that was recorded or opened in the page",
        )
    } else if is_old_pickle(text) {
        ("a pickle of protocol 0", Foreign::OLD_PICKLE.advice)
    } else {
        (
            "a text file without the header of an RMM log",
            "an RMM log begins with the line `Thread,Time,Action,Pointer,Size,Stream`",
        )
    };
    Some(Foreign { looks, advice })
}

/// Python begins a dict or a list by its opcode and its memo entry, and then a mark or, if it is empty, the
/// end.
fn pickle_of_protocol_1(start: &[u8]) -> Option<Foreign> {
    let is_old = match start {
        [b'}' | b']', b'q', _, rest @ ..] => matches!(rest, [b'(' | b'.' | b'U' | b'X' | b'}', ..]),
        [b'}' | b']', b'r', _, _, _, _, rest @ ..] => matches!(rest, [b'(' | b'.', ..]),
        _ => false,
    };
    is_old.then_some(Foreign::OLD_PICKLE)
}

/// Python begins a dict or a list by a mark, its opcode, and its memo entry.
fn is_old_pickle(text: &str) -> bool {
    ["(dp", "(lp", "(d.", "(l.", "ccopy_reg", "c__builtin__"].iter().any(|it| text.starts_with(it))
}
