//! The timeline as one SVG: categories as stacked areas, reserved bytes as lines, failures as marks.

use std::fmt::Write as _;
use std::ops::Range;

use super::encode::{Encoded, Head};
use super::text::{escape, plain};
use crate::number::Count;

const WIDTH: f64 = 960.0;
const PLOT_HEIGHT: f64 = 242.0;
const LEFT: f64 = 76.0;
const RIGHT: f64 = 12.0;
const TOP: f64 = 34.0;

/// Colours of the categories, by their index: Okabe and Ito's, which readers with any kind of
/// colour vision can tell apart. `style.css` and `timeline.js` have the same.
pub(super) const CATEGORY: [&str; 9] = [
    "#0072b2", "#e69f00", "#009e73", "#56b4e9", "#cc79a7", "#d55e00", "#f0e442", "#999999",
    "#b9b4a7",
];

/// Where the drawing is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Colours {
    /// In the page, whose style sets the colours of texts and lines.
    Page,
    /// Alone, on white.
    #[cfg(feature = "pictures")]
    Alone,
}

/// Draws the timeline of a job. O(bins).
pub(super) fn timeline(data: &Encoded, colours: Colours) -> String {
    let head = &data.head;
    let bins = &head.bins;
    let curves_most = head.curves.iter().map(|curve| curve.most);
    let most = curves_most.chain([head.peak_bytes]).max().unwrap_or(0).max(1);
    let step = tick_step(most);
    let top = most.div_ceil(step).saturating_mul(step) as f64;
    let (plot_w, plot_h) = (WIDTH - LEFT - RIGHT, PLOT_HEIGHT);
    let columns = bins.max.len().max(1) as f64;
    let x = |bin: usize| LEFT + bin as f64 / columns * plot_w;
    let y = |bytes: u64| TOP + plot_h - bytes as f64 / top * plot_h;
    let mut body = String::new();
    for tick in 0..=(top / step as f64) as u64 {
        let bytes = tick.saturating_mul(step);
        let at = y(bytes);
        let _ = writeln!(
            body,
            "<path class=\"grid\" stroke=\"#d0d7de\" d=\"M{LEFT} {at:.1}H{:.1}\"/>",
            LEFT + plot_w
        );
        text(&mut body, (LEFT - 8.0, at + 4.0), "end", &tick_text(bytes));
    }
    areas(&mut body, head, x, y);
    for curve in head.curves.iter().enumerate() {
        line(&mut body, head, curve, x, y);
    }
    for failure in &head.failures {
        let at = LEFT + failure.state as f64 / (head.events + 1) as f64 * plot_w;
        let _ = writeln!(
            body,
            "<path class=\"failure\" stroke=\"#cf222e\" stroke-width=\"1.5\" d=\"M{at:.1} {TOP}V{:.1}\"/>",
            TOP + plot_h
        );
    }
    for quarter in 0..=4_usize {
        let at = LEFT + quarter as f64 / 4.0 * plot_w;
        let anchor = ["start", "middle", "middle", "middle", "end"][quarter];
        let event = (head.events * quarter / 4) as u64;
        let name = if quarter == 0 { "event " } else { "" };
        text(&mut body, (at, TOP + plot_h + 18.0), anchor, &format!("{name}{}", Count(event)));
    }
    let height = legend(&mut body, head, TOP + plot_h + 42.0);
    let title = format!("Memory of {}", plain(&head.name));
    text(&mut body, (LEFT, 18.0), "start", &title);
    let ground = match colours {
        Colours::Page => "",
        #[cfg(feature = "pictures")]
        Colours::Alone => "<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n",
    };
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"timeline\" viewBox=\"0 0 {WIDTH} \
         {height}\" role=\"img\" aria-label=\"{}\" font-family=\"DejaVu Sans, system-ui, \
         sans-serif\" font-size=\"12\">\n{ground}{body}</svg>\n",
        escape(&title)
    )
}

fn areas(body: &mut String, head: &Head, x: impl Fn(usize) -> f64, y: impl Fn(u64) -> f64) {
    let bins = &head.bins;
    let mut below = vec![0_u64; bins.max.len()];
    for (category, values) in bins.categories.iter().enumerate() {
        if values.iter().all(|&bytes| bytes == 0) {
            continue;
        }
        let above: Vec<u64> =
            below.iter().zip(values).map(|(below, bytes)| below.saturating_add(*bytes)).collect();
        let mut path = steps(above.iter().copied().enumerate(), &x, &y, 0..above.len());
        let down = steps(below.iter().copied().enumerate().rev(), &x, &y, 0..below.len());
        // Back along the area below.
        path.push_str(&down.replacen('M', "L", 1));
        let _ = writeln!(body, "<path fill=\"{}\" d=\"{path}Z\"/>", colour(category));
        below = above;
    }
}

fn line(
    body: &mut String,
    head: &Head,
    (nth, curve): (usize, &super::encode::CurveHead),
    x: impl Fn(usize) -> f64,
    y: impl Fn(u64) -> f64,
) {
    let Some(values) = head.bins.curves.get(nth) else { return };
    let path = steps(values.iter().copied().enumerate(), &x, &y, 0..values.len());
    let (colour, dash) = stroke(curve.kind);
    let _ = writeln!(
        body,
        "<path class=\"curve-{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.6\" \
         stroke-dasharray=\"{dash}\" d=\"{path}\"/>",
        curve.kind
    );
}

/// Returns the path of a step curve over bins, forwards or backwards. Bins of one height are one step.
fn steps(
    bins: impl Iterator<Item = (usize, u64)>,
    x: &impl Fn(usize) -> f64,
    y: &impl Fn(u64) -> f64,
    all: Range<usize>,
) -> String {
    let mut path = String::new();
    let (mut height, mut end) = (String::new(), None);
    let mut backwards = false;
    for (bin, bytes) in bins {
        backwards |= path.is_empty() && bin > all.start;
        let (from, to) = if backwards { (bin + 1, bin) } else { (bin, bin + 1) };
        let next = format!("{:.1}", y(bytes));
        if path.is_empty() {
            let _ = write!(path, "M{:.1} {next}", x(from));
        } else if next != height {
            let _ = write!(path, "H{:.1}V{next}", x(from));
        }
        height = next;
        end = Some(to);
    }
    if let Some(end) = end {
        let _ = write!(path, "H{:.1}", x(end));
    }
    path
}

/// Returns the colour and the dashes of a curve.
fn stroke(kind: &str) -> (&'static str, &'static str) {
    match kind {
        "recorded" => ("#24292f", "none"),
        "vramp" => ("#1a7f37", "none"),
        "torch" => ("#8250df", "5 3"),
        _ => ("#bf3989", "2 3"),
    }
}

/// Draws the names of curves and categories, in as many lines as they need, from `top` down.
/// Returns the height of the drawing.
fn legend(body: &mut String, head: &Head, top: f64) -> f64 {
    let (mut x, mut y) = (LEFT, top);
    let mut place = |name: &str| {
        let width = 30.0 + name.chars().count() as f64 * 7.0;
        if x + width > WIDTH && x > LEFT {
            (x, y) = (LEFT, y + 18.0);
        }
        let found = (x, y);
        x += width;
        found
    };
    for curve in &head.curves {
        let (x, y) = place(&curve.label);
        let (colour, dash) = stroke(curve.kind);
        let _ = writeln!(
            body,
            "<path class=\"curve-{}\" stroke=\"{colour}\" stroke-width=\"2\" \
             stroke-dasharray=\"{dash}\" d=\"M{x:.1} {:.1}h14\"/>",
            curve.kind,
            y - 4.0
        );
        text(body, (x + 19.0, y), "start", &curve.label);
    }
    for (category, name) in head.categories.iter().enumerate() {
        if head.bins.categories.get(category).is_some_and(|values| values.iter().any(|&b| b > 0)) {
            let (x, y) = place(name);
            let _ = writeln!(
                body,
                "<rect x=\"{x:.1}\" y=\"{:.1}\" width=\"11\" height=\"11\" fill=\"{}\"/>",
                y - 10.0,
                colour(category)
            );
            text(body, (x + 16.0, y), "start", name);
        }
    }
    y + 14.0
}

fn text(body: &mut String, (x, y): (f64, f64), anchor: &str, words: &str) {
    let _ = writeln!(
        body,
        "<text class=\"label\" x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" fill=\"#57606a\">{}</text>",
        escape(words)
    );
}

fn colour(category: usize) -> &'static str {
    CATEGORY[category % CATEGORY.len()]
}

/// Returns the bytes between two lines of the grid: 1, 2 or 5 times a power of ten of a binary unit,
/// so that there are 3 to 6 lines.
fn tick_step(most: u64) -> u64 {
    let unit = unit_of(most);
    let whole = most as f64 / unit as f64;
    let mut step = 0.1;
    for next in [0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0] {
        step = next;
        if whole / next <= 6.0 {
            break;
        }
    }
    ((step * unit as f64) as u64).max(1)
}

fn unit_of(bytes: u64) -> u64 {
    let units = [1_u64 << 50, 1 << 40, 1 << 30, 1 << 20, 1 << 10];
    units.into_iter().find(|&unit| bytes >= unit).unwrap_or(1)
}

fn tick_text(bytes: u64) -> String {
    let unit = unit_of(bytes);
    let name = match unit {
        1 => "B",
        0x400 => "KiB",
        0x10_0000 => "MiB",
        0x4000_0000 => "GiB",
        0x100_0000_0000 => "TiB",
        _ => "PiB",
    };
    let whole = bytes as f64 / unit as f64;
    match whole.fract() < 0.05 || whole >= 100.0 {
        true => format!("{whole:.0} {name}"),
        false => format!("{whole:.1} {name}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_grid_has_three_to_seven_lines() {
        for most in [1_u64, 9, 1000, 1 << 20, 77 << 20, 3 << 30, 141 << 30, 900 << 40] {
            let lines = most.div_ceil(tick_step(most));
            assert!((1..=7).contains(&lines), "{most}: {lines}");
        }
        assert_eq!(tick_text(0), "0 B");
        assert_eq!(tick_text(20 << 30), "20 GiB");
        assert_eq!(tick_text(1536 << 20), "1.5 GiB");
    }
}
