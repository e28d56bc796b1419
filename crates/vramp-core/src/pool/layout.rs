//! The pool's addresses in VPMM's notation, in whole pages: `[+11]` the newest block, `[4]` a
//! block, `[-6]` free, `[*10]` a hole or a retired mapping behind which something is mapped,
//! `[!2]` what the pool cannot use: quarantined, or memory of the host.

use std::fmt;

use crate::Bytes;
use crate::ids::{BlockId, Mark, SpanId};
use crate::pool::index::RegionKey;
use crate::pool::regions::Kind;
use crate::pool::view::View;

impl View<'_> {
    pub(crate) fn layout(self, newest: Option<BlockId>) -> String {
        let page = self.config.page;
        let mut drawn: Vec<(&str, Bytes)> = Vec::new();
        let first = SpanId::new(0);
        for (key, region) in self.regions.iter().take_while(|(_, r)| r.at.span() == first) {
            let sign = match &region.kind {
                Kind::Used(_) if newest.is_some_and(|id| id.index == key) => "+",
                Kind::Used(_) | Kind::Arena { .. } => "",
                Kind::Free(_) | Kind::Waiting { .. } => "-",
                Kind::Hole | Kind::Gap { .. } | Kind::Retired { .. } => "*",
                Kind::Hosted { .. } | Kind::Quarantined { .. } => "!",
            };
            match drawn.last_mut() {
                Some((last, len)) if *last == sign && (sign == "-" || sign == "*") => {
                    *len += region.len;
                }
                _ => drawn.push((sign, region.len)),
            }
        }
        if drawn.last().is_some_and(|(sign, _)| *sign == "*") {
            drawn.pop();
        }
        drawn.iter().map(|(sign, len)| format!("[{sign}{}]", len.whole(page))).collect()
    }

    /// Writes the census and every region in address order.
    pub(crate) fn describe(self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.census())?;
        for (key, region) in self.regions.iter() {
            let what = match &region.kind {
                Kind::Hole => "hole".to_owned(),
                Kind::Gap { arena } => format!("gap of {arena}"),
                Kind::Hosted { arena } => format!("hosted, {arena}"),
                Kind::Arena { arena, .. } => format!("{arena}"),
                Kind::Free(free) if free.lent_by.is_some() => format!("lent, {:?}", free.lent_by),
                Kind::Free(free) => format!("free, {}", free.owner),
                Kind::Waiting { owner, .. } => {
                    format!("waiting, {owner}, for {:?}", self.marks_of(key))
                }
                Kind::Used(used) if used.slab => format!("slab, {}", used.stream),
                Kind::Used(used) => format!("used, {}", used.stream),
                Kind::Retired { chunk, .. } => format!("retired, {chunk}"),
                Kind::Quarantined { .. } => "quarantined".to_owned(),
            };
            writeln!(f, "{:?} {:>12} {what}", region.at, region.len.to_string())?;
        }
        Ok(())
    }

    fn marks_of(self, waiting: RegionKey) -> Vec<Mark> {
        let entry = self.waiting.iter().find(|entry| entry.item == waiting);
        entry.map(|entry| entry.marks.clone()).unwrap_or_default()
    }
}
