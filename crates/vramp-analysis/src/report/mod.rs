//! A report of a recorded job as one HTML file, which needs no other file and no network.
//!
//! 1. [`Encoded::of`] turns the events of one device into compressed columns and an overview.
//! 2. [`Report`] puts these and what was found about them into one page.
//! 3. [`Report::write`] writes it. `Encoded::timeline_svg` and `timeline_png`, with the feature `pictures`, draw
//!    the timeline alone.
//!
//! What comes from a recording is data in the page: it is escaped, shortened, and never markup or
//! script. A policy in the page forbids every other script, style and request.
//!
//! # How it grows
//!
//! | with | the file | encoding | the page in a browser |
//! |---|---|---|---|
//! | events | 1 to 4 bytes each, half of it addresses | linear; 80 bytes of memory each | 1 byte each; moments and regrouping are linear, drawing takes one step for 64 events |
//! | blocks, dead or live | part of the events | 32 bytes each | 44 bytes each |
//! | blocks live at a moment | nothing | nothing | n log n for the addresses |
//! | different frames at a place of the tree of stacks | 10 to 20 bytes each | a map | at most 3,000 are drawn |
//! | segments and their changes | 10 bytes each | n log n | at most 40 are drawn |
//!
//! Deliberately absent: what the findings are, arguments, files.

mod bins;
mod columns;
mod encode;
mod findings;
mod page;
mod ranges;
mod ranks;
#[cfg(feature = "pictures")]
mod raster;
mod svg;
mod text;

pub use encode::{Curve, Encoded, Kept, Source};
pub use findings::Facts;
pub use page::{Cell, Figure, Findings, Part, Report, Table, Tone};
#[cfg(feature = "pictures")]
pub use raster::DrawError;

#[cfg(test)]
mod tests {
    use std::path::Path;

    use sha2::{Digest, Sha256};

    #[test]
    fn the_libraries_are_unchanged() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/report/assets/vendor");
        let table = std::fs::read_to_string(folder.join("README.md")).unwrap();
        let mut checked = Vec::new();
        for row in table.lines().filter(|line| line.starts_with("| `")) {
            let cells: Vec<&str> =
                row.split('|').map(|cell| cell.trim().trim_matches('`')).collect();
            let bytes = std::fs::read(folder.join(cells[1])).unwrap();
            let sum: String =
                Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(sum, cells[6], "{}", cells[1]);
            checked.push(cells[1].to_owned());
        }
        let files = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name());
        for file in files.map(|name| name.into_string().unwrap()) {
            let known =
                checked.contains(&file) || file == "README.md" || file.ends_with(".LICENSE");
            assert!(known, "{file} has no row in vendor/README.md");
        }
        assert_eq!(checked.len(), 4);
    }
}
