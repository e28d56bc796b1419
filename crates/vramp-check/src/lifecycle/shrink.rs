//! Makes a failing program short: parts are left out as long as it still fails.

use super::op::Op;

/// Returns a part of `program` that still fails. `fails` runs a program; it is called at most
/// `runs` times.
pub(super) fn shrink(
    mut program: Vec<Op>,
    mut runs: u32,
    mut fails: impl FnMut(&[Op]) -> bool,
) -> Vec<Op> {
    let mut part = program.len().div_ceil(2);
    while part > 0 && runs > 0 {
        let (mut at, mut shorter) = (0, false);
        while at < program.len() && runs > 0 {
            let end = (at + part).min(program.len());
            let without: Vec<Op> = [&program[..at], &program[end..]].concat();
            runs -= 1;
            if fails(&without) {
                program = without;
                shorter = true;
            } else {
                at = end;
            }
        }
        if !shorter || part > 1 {
            part = if part == 1 { 0 } else { part.div_ceil(2) };
        }
    }
    program
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_failure_does_not_need_is_left_out() {
        let program: Vec<Op> = (0..100).map(|ns| Op::Advance { ns }).collect();
        let needs = |ops: &[Op], ns| ops.contains(&Op::Advance { ns });
        let short = shrink(program, 1000, |ops| needs(ops, 17) && needs(ops, 80));
        assert_eq!(short, [Op::Advance { ns: 17 }, Op::Advance { ns: 80 }]);
    }
}
