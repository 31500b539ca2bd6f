//! Every operation on the CPU: forward against a plain loop, backward against central differences in f64.

mod support;

use armt_engine::Device;
use support::{Case, cases, check};

/// Relative to the largest value: f32 rounding at these sizes stays well below.
const TOLERANCE: f64 = 1e-4;

fn assert_all(cases: Vec<Case>) {
    assert!(!cases.is_empty());
    let failures: Vec<String> = cases
        .iter()
        .filter_map(|case| check(case, &Device::cpu(), TOLERANCE).err().map(|e| format!("{}: {e}", case.name)))
        .collect();
    assert!(failures.is_empty(), "{} of {} cases fail:\n{}", failures.len(), cases.len(), failures.join("\n"));
}

#[test]
fn every_operation_agrees_with_plain_loops_and_their_differences() {
    assert_all(cases::all());
}
