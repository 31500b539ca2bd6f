//! Training steps as [`Stepper`] makes them, against the same steps by hand.

#![allow(clippy::unwrap_used)]

#[path = "../../armt/tests/small/mod.rs"]
mod small;

use std::sync::Mutex;

use armt::config::Alignment;
use armt::engine::optim::{AdamW, Group, Settings};
use armt::engine::{Communicator, Device, Error, Membership, Tape};
use armt::schedule::{Backprop, ScheduleKind};
use armt::{Model, recurrence::Targets};
use armt_lab::tasks::TaskBatch;
use armt_lab::train::Stepper;
use small::{memories, tokens};

/// One test at a time on the GPU, where there is one: recording a graph notices what other threads do.
static GPU: Mutex<()> = Mutex::new(());

/// From fixed weights and data, ten training steps. On the GPU where there is one: `cargo test --test steps ten_losses`.
#[test]
fn ten_losses_are_the_same_under_every_schedule() {
    let learner = |device: &Device| -> (Model, AdamW) {
        let config = small::config("gpt2", 3, memories().remove(0), 4, Alignment::Left);
        // Small weights, rate and a large eps: otherwise ten steps blow the devices' rounding up to anything (1e-6 in a weight to 5e-2).
        let model = small::model_of_spread(config, 8, 0.1, device);
        let params = model.params().into_iter().cloned().collect();
        let settings = Settings { eps: 1e-3, ..Settings::default() };
        let optimizer = AdamW::new(vec![Group { params, weight_decay: 0.01, rate: 1.0 }], settings).unwrap();
        (model, optimizer)
    };
    let example = |step: u64| {
        // Two lengths, each of which comes again.
        let batch = tokens(3, 14 + 4 * (step as usize % 2), step % 3);
        let targets = Targets::shifted(&batch.ids, None, 3);
        TaskBatch { batch, targets }
    };
    let losses = |device: &Device, schedule: ScheduleKind| -> Vec<f32> {
        let (model, mut optimizer) = learner(device);
        let step = |step| {
            let TaskBatch { batch, targets } = example(step);
            let tape = Tape::new();
            let state = model.empty(3).unwrap();
            let (loss, _) = model.loss(&tape, &batch, &targets, &state, schedule, Backprop::default()).unwrap();
            optimizer.zero_grad().unwrap();
            tape.backward(&loss).unwrap();
            optimizer.step(1e-3).unwrap();
            loss.item().unwrap()
        };
        (0..10).map(step).collect()
    };
    // On CUDA the second step of a length is recorded, and from there on replayed.
    let stepped = |device: &Device| -> Vec<f32> {
        let (model, optimizer) = learner(device);
        let mut stepper = Stepper::new(&model, optimizer, Backprop::default(), ScheduleKind::Diagonal).unwrap();
        (0..10).map(|step| stepper.step(&example(step), 1, 1e-3).unwrap()).collect()
    };
    assert_eq!(stepped(&Device::cpu()), losses(&Device::cpu(), ScheduleKind::Diagonal));
    let sequential = losses(&Device::cpu(), ScheduleKind::Sequential);
    assert!(sequential[9] < sequential[0], "{sequential:?}");
    let mut others = vec![("cpu diagonal", losses(&Device::cpu(), ScheduleKind::Diagonal))];
    let _alone = GPU.lock().unwrap();
    match Device::cuda(0) {
        Ok(cuda) => {
            others.push(("cuda diagonal", losses(&cuda, ScheduleKind::Diagonal)));
            // On CUDA it fills asked positions up to round numbers, so that sums over them come in another order.
            others.push(("cuda diagonal, replayed", stepped(&cuda)));
        }
        Err(why) => println!("not on the GPU: {why}"),
    }
    for (name, other) in others {
        println!("{name}: {other:?}");
        let most = sequential.iter().zip(&other).map(|(a, b)| (a - b).abs() / a.abs()).fold(0f32, f32::max);
        println!("{name} differs by at most {most:.1e}");
        for (a, b) in sequential.iter().zip(&other) {
            assert!((a - b).abs() < 1e-3 * a.abs(), "{name}: {other:?} instead of {sequential:?}");
        }
    }
}

/// Texts that go on where those before them ended, some that begin anew, two lengths: by hand, and in steps that are recorded and replayed
/// on a GPU.
#[test]
fn texts_go_on_from_the_memory_that_those_before_them_left() {
    let learner = |device: &Device| {
        let config = small::config("gpt2", 3, memories().remove(0), 4, Alignment::Left);
        let model = small::model_of_spread(config, 8, 0.1, device);
        let settings = Settings { eps: 1e-3, ..Settings::default() };
        let group = Group { params: model.params().into_iter().cloned().collect(), weight_decay: 0.01, rate: 1.0 };
        (model, AdamW::new(vec![group], settings).unwrap())
    };
    let example = |step: u64| {
        let batch = tokens(3, 12 + 4 * (step as usize % 2), step);
        let targets = Targets::shifted(&batch.ids, None, 3);
        TaskBatch { batch, targets }
    };
    let onward = |step: u64| step % 5 != 3;
    for backprop in [Backprop::default(), Backprop { unwind: true, ..Backprop::default() }] {
        let (model, mut optimizer) = learner(&Device::cpu());
        let mut memory = model.empty(3).unwrap();
        let by_hand = (0..12).map(|step| {
            let (TaskBatch { batch, targets }, tape) = (example(step), Tape::new());
            let state = if onward(step) { memory.clone() } else { model.empty(3).unwrap() };
            let (loss, after) = model.loss(&tape, &batch, &targets, &state, ScheduleKind::Sequential, Backprop::default()).unwrap();
            memory = after.detach();
            optimizer.zero_grad().unwrap();
            tape.backward(&loss).unwrap();
            optimizer.step(1e-3).unwrap();
            loss.item().unwrap()
        });
        let by_hand: Vec<f32> = by_hand.collect();
        let stepped = |device: &Device| -> Vec<f32> {
            let (model, optimizer) = learner(device);
            let mut stepper = Stepper::new(&model, optimizer, backprop, ScheduleKind::Auto).unwrap();
            let step = |step| {
                if !onward(step) {
                    stepper.begin_anew()?;
                }
                stepper.step_onward(&example(step), 1e-3)
            };
            (0..12).map(step).collect::<armt_lab::Result<_>>().unwrap()
        };
        let mut others = vec![stepped(&Device::cpu())];
        let _alone = GPU.lock().unwrap();
        match Device::cuda(0) {
            Ok(cuda) => others.push(stepped(&cuda)),
            Err(why) => println!("not on the GPU: {why}"),
        }
        for other in others {
            for (a, b) in by_hand.iter().zip(&other) {
                assert!((a - b).abs() < 1e-3 * a.abs(), "{other:?} instead of {by_hand:?}");
            }
        }
        // What was carried matters.
        let (model, optimizer) = learner(&Device::cpu());
        let mut stepper = Stepper::new(&model, optimizer, backprop, ScheduleKind::Auto).unwrap();
        let empty: Vec<f32> = (0..12).map(|step| stepper.step(&example(step), 1, 1e-3).unwrap()).collect();
        assert!(by_hand.iter().zip(&empty).any(|(a, b)| (a - b).abs() > 1e-3 * a.abs()), "{by_hand:?}, {empty:?}");
        assert!(stepper.step_onward(&TaskBatch { batch: tokens(3, 12, 0), ..example(0) }, 1e-3).is_ok());
        let other = tokens(2, 12, 0);
        let targets = Targets::shifted(&other.ids, None, 2);
        let error = stepper.step_onward(&TaskBatch { batch: other, targets }, 1e-3).unwrap_err().to_string();
        assert!(error.contains("3 text(s) side by side, but 2 came"), "{error}");
    }
}

/// Threads as processes: what each has is added up where all have come.
struct Threads<'a> {
    rank: usize,
    meet: &'a std::sync::Barrier,
    given: &'a [Mutex<Vec<f32>>; 2],
}

impl armt_lab::train::replicas::Replicas for Threads<'_> {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        2
    }

    fn add_up(&self, values: &mut [f32]) -> armt_lab::Result<()> {
        *self.given[self.rank].lock().unwrap() = values.to_vec();
        self.meet.wait();
        let sum: Vec<f32> =
            self.given[0].lock().unwrap().iter().zip(self.given[1].lock().unwrap().iter()).map(|(a, b)| a + b).collect();
        self.meet.wait();
        values.copy_from_slice(&sum);
        Ok(())
    }
}

/// Each of two replicas has half of every batch, and both make the step of the whole batch in two parts.
#[test]
fn two_replicas_make_the_steps_of_one() {
    let config = small::config("gpt2", 2, memories().remove(0), 4, Alignment::Left);
    let learner = || {
        let model = small::model_of_spread(config.clone(), 8, 0.1, &Device::cpu());
        let params = model.params().into_iter().cloned().collect();
        let settings = Settings { eps: 1e-3, ..Settings::default() };
        (model, AdamW::new(vec![Group { params, weight_decay: 0.01, rate: 1.0 }], settings).unwrap())
    };
    let example = |step: u64| {
        let batch = tokens(4, 10, step);
        let targets = Targets::shifted(&batch.ids, None, 4);
        TaskBatch { batch, targets }
    };
    let values = |model: &Model| model.export(|p| Ok(p.value())).unwrap();
    let (meet, given) = (std::sync::Barrier::new(2), [Mutex::default(), Mutex::default()]);
    let replica = |rank: usize| {
        let replicas = Threads { rank, meet: &meet, given: &given };
        let (model, optimizer) = learner();
        let mut stepper = Stepper::new(&model, optimizer, Backprop::default(), ScheduleKind::Auto).unwrap().among(&replicas);
        let losses: Vec<f32> = (0..5).map(|step| stepper.step(&example(step), 1, 1e-3).unwrap()).collect();
        drop(stepper);
        (losses, values(&model))
    };
    let (first, second) = std::thread::scope(|scope| {
        let second = scope.spawn(|| replica(1));
        (replica(0), second.join().unwrap())
    });
    assert!(first == second, "both have the same parameters");
    let (model, optimizer) = learner();
    let mut alone = Stepper::new(&model, optimizer, Backprop::default(), ScheduleKind::Auto).unwrap();
    let losses: Vec<f32> = (0..5).map(|step| alone.step(&example(step), 2, 1e-3).unwrap()).collect();
    drop(alone);
    for (a, b) in first.0.iter().zip(&losses) {
        assert!((a - b).abs() < 1e-5, "{a} of two, {b} of one");
    }
    for ((name, _, a), (_, _, b)) in first.1.iter().zip(&values(&model)) {
        assert!(a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-5), "{name}");
    }
    let error = {
        let replicas = Threads { rank: 0, meet: &meet, given: &given };
        let (model, optimizer) = learner();
        let mut stepper = Stepper::new(&model, optimizer, Backprop::default(), ScheduleKind::Auto).unwrap().among(&replicas);
        stepper.step(&example(0), 4, 1e-3).unwrap_err().to_string()
    };
    assert!(error.contains("a multiple of 4 parts by 2 processes, got 4"), "{error}");
}

/// A part counts by what it asks: a batch in parts has the loss and the gradients of the whole.
#[test]
fn parts_that_ask_unequally_make_the_step_of_the_whole() {
    let config = small::config("gpt2", 2, memories().remove(0), 4, Alignment::Left);
    let batch = tokens(4, 10, 1);
    let mut targets = Targets::shifted(&batch.ids, None, 4);
    // Of the first two texts one position each, of the others all.
    targets.next[..20].iter_mut().enumerate().filter(|(i, _)| i % 10 != 3).for_each(|(_, next)| *next = -1);
    let asked = TaskBatch { batch, targets };
    let stepped = |device: &Device, parts: usize| -> (Vec<f32>, Vec<f32>) {
        let model = small::model_of_spread(config.clone(), 8, 0.1, device);
        let params: Vec<_> = model.params().into_iter().cloned().collect();
        let settings = Settings { eps: 1e-3, ..Settings::default() };
        let optimizer = AdamW::new(vec![Group { params: params.clone(), weight_decay: 0.01, rate: 1.0 }], settings).unwrap();
        let mut stepper = Stepper::new(&model, optimizer, Backprop::default(), ScheduleKind::Auto).unwrap();
        // Run, and on a GPU recorded and replayed.
        let losses = (0..3).map(|_| stepper.step(&asked, parts, 1e-3).unwrap()).collect();
        (losses, params.iter().flat_map(|p| p.grad().unwrap().to_vec::<f32>().unwrap()).collect())
    };
    let mut devices = vec![Device::cpu()];
    let _alone = GPU.lock().unwrap();
    devices.extend(Device::cuda(0));
    for device in devices {
        let (losses, gradients) = stepped(&device, 1);
        for parts in [2, 4] {
            let (some, other) = stepped(&device, parts);
            for (a, b) in losses.iter().zip(&some) {
                assert!((a - b).abs() < 1e-4 * a.abs(), "{parts} parts: {some:?} instead of {losses:?}");
            }
            let most = gradients.iter().fold(0f32, |most, g| most.max(g.abs()));
            let differs = gradients.iter().zip(&other).fold(0f32, |most, (a, b)| most.max((a - b).abs()));
            assert!(differs < 1e-3 * most, "{parts} parts: gradients of up to {most} differ by {differs}");
        }
    }
}

/// NCCL over one process changes nothing: sums of one, on a stream of their own, in steps that are run, recorded and replayed. On a GPU with NCCL.
#[test]
fn one_process_over_nccl_makes_the_bits_of_one_without() {
    let device = match Device::cuda(0) {
        Ok(device) => device,
        Err(why) => return println!("skipped: {why}"),
    };
    let _alone = GPU.lock().unwrap();
    let communicator = match Communicator::join(&device, Membership::alone()) {
        Ok(communicator) => communicator,
        Err(why @ Error::Library { .. }) => return println!("skipped: {why}"),
        Err(why) => panic!("{why}"),
    };
    let run = |replicas: Option<&dyn armt_lab::train::replicas::Replicas>| {
        let config = small::config("gpt2", 3, memories().remove(0), 4, Alignment::Left);
        let model = small::model_of_spread(config, 8, 0.1, &device);
        let params = model.params().into_iter().cloned().collect();
        let settings = Settings { eps: 1e-3, ..Settings::default() };
        let optimizer = AdamW::new(vec![Group { params, weight_decay: 0.01, rate: 1.0 }], settings).unwrap();
        let stepper = Stepper::new(&model, optimizer, Backprop::default(), ScheduleKind::Auto).unwrap();
        let mut stepper = match replicas {
            Some(replicas) => stepper.among(replicas),
            None => stepper,
        };
        // Two lengths and two numbers of parts, each of which comes again.
        let losses = (0..12u64).map(|step| {
            let batch = tokens(4, 14 + 4 * (step as usize % 2), step);
            let targets = Targets::shifted(&batch.ids, None, 4);
            stepper.step(&TaskBatch { batch, targets }, 1 + step as usize / 2 % 2, 1e-3).unwrap()
        });
        let losses: Vec<f32> = losses.collect();
        drop(stepper);
        (losses, model.export(|p| Ok(p.value())).unwrap())
    };
    assert!(run(Some(&communicator)) == run(None), "NCCL with one process changed a bit");
    communicator.leave().unwrap();
}
