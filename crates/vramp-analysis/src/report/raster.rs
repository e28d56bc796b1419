//! The timeline as a file of its own: SVG without fonts, and PNG.
//!
//! Letters are drawn as shapes of a font that is part of the program, so that the picture is the same
//! on a machine without fonts.

use std::sync::Arc;

use resvg::tiny_skia::{Pixmap, Transform};
use resvg::usvg::{Options, Tree, WriteOptions, fontdb};

use super::encode::Encoded;
use super::svg::{self, Colours};
use super::text::shown;

const FONT: &[u8] = include_bytes!("assets/vendor/DejaVuSans.ttf");

/// Pixels of a PNG for each unit of the drawing, so that it is sharp on dense screens.
const SCALE: f32 = 2.0;

/// Why a timeline was not drawn.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DrawError {
    /// The drawing is not valid SVG, which is a mistake of this crate.
    #[error("the timeline is no valid drawing: {0}; please report this")]
    Drawing(#[from] resvg::usvg::Error),
    /// No memory for the picture.
    #[error("no memory for a picture of {width} x {height} pixels")]
    Memory {
        /// Pixels across.
        width: u32,
        /// Pixels down.
        height: u32,
    },
    /// The picture was not encoded.
    #[error("the picture was not encoded: {0}")]
    Encoding(String),
}

impl Encoded {
    /// Returns the timeline as SVG that needs no font.
    ///
    /// # Errors
    /// [`DrawError::Drawing`].
    pub fn timeline_svg(&self) -> Result<String, DrawError> {
        let text = tree(self)?.to_string(&WriteOptions::default());
        let name = format!("role=\"img\" aria-label=\"Memory of {}\"", shown(&self.head.name));
        Ok(text.replacen("<svg ", &format!("<svg {name} "), 1))
    }

    /// Returns the timeline as PNG.
    ///
    /// # Errors
    /// See [`DrawError`].
    pub fn timeline_png(&self) -> Result<Vec<u8>, DrawError> {
        let tree = tree(self)?;
        let size = tree.size();
        let (width, height) = ((size.width() * SCALE) as u32, (size.height() * SCALE) as u32);
        let mut pixels = Pixmap::new(width, height).ok_or(DrawError::Memory { width, height })?;
        let scale = Transform::from_scale(SCALE, SCALE);
        resvg::render(&tree, scale, &mut pixels.as_mut());
        pixels.encode_png().map_err(|error| DrawError::Encoding(error.to_string()))
    }
}

fn tree(data: &Encoded) -> Result<Tree, DrawError> {
    let mut fonts = fontdb::Database::new();
    fonts.load_font_data(FONT.to_vec());
    let family = "DejaVu Sans".to_owned();
    let options = Options { fontdb: Arc::new(fonts), font_family: family, ..Options::default() };
    Ok(Tree::from_str(&svg::timeline(data, Colours::Alone), &options)?)
}
