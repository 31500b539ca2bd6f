//! Every operation on the CPU: forward against a plain loop, backward against central differences in f64.

mod support;

use armt_engine::Device;
use support::{Case, check};

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

macro_rules! tests {
    ($($name:ident: $cases:path;)*) => {
        $(
            #[test]
            fn $name() {
                super::assert_all($cases());
            }
        )*
    };
}

mod plain_loops_and_their_differences_agree_on {
    crate::support::cases::each_group!(tests);
}
