//! Several threads on one device: each gets the bits that it would get alone. The GPU's own test of this is in `gpu.rs`.

#![allow(clippy::unwrap_used)]

mod support;

use armt_engine::Device;
use support::training::train;

#[test]
fn four_threads_that_train_and_read_at_once_get_the_bits_of_one() {
    let cpu = Device::cpu();
    let alone: Vec<_> = (0..4).map(|seed| train(&cpu, seed).unwrap()).collect();
    let together: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|seed| {
                scope.spawn({
                    let cpu = &cpu;
                    move || train(cpu, seed).unwrap()
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert_eq!(alone, together);
}
