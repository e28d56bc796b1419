//! Texts of strangers as data in a page: shortened, without control characters, escaped.
//!
//! Names of files, frames, annotations and settings come from recordings. In the page they are never
//! markup and never script.

use std::fmt::Write as _;
use std::io;

use serde::Serialize;

/// Longest text of a recording in the page, in characters.
pub(super) const TEXT_MAX: usize = 240;

/// Returns `text` with at most [`TEXT_MAX`] characters. Control characters, and those that change
/// the direction of the text around them, become visible as `\u{202e}`.
///
/// O([`TEXT_MAX`]), however long `text` is.
pub(super) fn plain(text: &str) -> String {
    let mut plain = String::with_capacity(text.len().min(TEXT_MAX));
    let mut characters = text.chars();
    for character in characters.by_ref().take(TEXT_MAX) {
        if is_invisible(character) {
            let _ = write!(plain, "\\u{{{:x}}}", u32::from(character));
        } else {
            plain.push(character);
        }
    }
    if characters.next().is_some() {
        plain.push_str("...");
    }
    plain
}

/// Returns true for characters that show nothing, or change how others are shown.
fn is_invisible(character: char) -> bool {
    character.is_control()
        || matches!(character, '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}')
}

/// Returns `text` as it stands in HTML and SVG: in elements, and in attributes in double or single
/// quotes.
pub(super) fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len() + 16);
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            other => escaped.push(other),
        }
    }
    escaped
}

/// Returns `text`, made plain and then escaped.
pub(super) fn shown(text: &str) -> String {
    escape(&plain(text))
}

/// Returns `value` as JSON that cannot end the script element around it: `<`, `>`, `&` and the line
/// separators of JavaScript are escape sequences. They occur only within texts.
pub(super) fn island(value: &impl Serialize) -> io::Result<String> {
    let json = serde_json::to_string(value)?;
    let mut safe = String::with_capacity(json.len());
    for character in json.chars() {
        match character {
            '<' | '>' | '&' | '\u{2028}' | '\u{2029}' => {
                let _ = write!(safe, "\\u{:04x}", u32::from(character));
            }
            other => safe.push(other),
        }
    }
    Ok(safe)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_texts_are_cut_and_invisible_characters_are_shown() {
        assert_eq!(plain("a\0b\u{202e}c\u{2028}"), "a\\u{0}b\\u{202e}c\\u{2028}");
        assert_eq!(plain("\u{e4}\u{4e2d}"), "\u{e4}\u{4e2d}");
        let long = plain(&"x".repeat(16 << 20));
        assert_eq!(long.len(), TEXT_MAX + 3);
        assert_eq!(plain(&"x".repeat(TEXT_MAX)).len(), TEXT_MAX);
    }

    #[test]
    fn nothing_of_a_text_is_markup() {
        assert_eq!(
            escape("</script><img src=x onerror='a()' b=\"c\">&"),
            "&lt;/script&gt;&lt;img src=x onerror=&#39;a()&#39; b=&quot;c&quot;&gt;&amp;"
        );
    }

    #[test]
    fn an_island_is_equal_json_and_has_no_bracket() {
        let text = "</script><!-- ]]> & \u{2028} \" \\";
        let json = island(&[text]).unwrap();
        assert!(!json.contains(['<', '>', '&', '\u{2028}']), "{json}");
        let read: Vec<String> = serde_json::from_str(&json).unwrap();
        assert_eq!(read, [text]);
    }
}
