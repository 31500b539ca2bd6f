//! Which gradients are added up together over several processes, and in what order.
//!
//! On the way back of a diagonal the layers settle from the top: layer l takes part in the steps l to l + segments - 1, so that its gradient is whole
//! after step l, when the steps of fewer layers that come before are still to be played. Embeddings, and a head that is one with them, settle last. So
//! buckets go from the top layer down, the rows of those layers in every stacked parameter, and what is not stacked comes last. The plan follows from the
//! parameters' shapes alone: it is the same in all processes, whatever texts each has.

use std::ops::Range;

use armt::engine::{Param, Result, Tensor, ops};

/// Bytes that a bucket has at most, unless a layer has more: few enough to begin early, enough for the links' full rate.
const FULL: usize = 25 << 20;

/// Gradients of parameters in buckets, each element in one of them. Whether a parameter is stacked is seen by its leading axis; one that merely looks so
/// is only cut more finely.
pub(super) fn plan<'p>(params: impl Iterator<Item = &'p Param>, layers: usize) -> Result<Vec<Vec<Tensor>>> {
    plan_of(params, layers, FULL)
}

fn plan_of<'p>(params: impl Iterator<Item = &'p Param>, layers: usize, full: usize) -> Result<Vec<Vec<Tensor>>> {
    let gradients = params.map(Param::grad).collect::<Result<Vec<_>>>()?;
    let (stacked, rest): (Vec<&Tensor>, Vec<&Tensor>) = gradients.into_iter().partition(|g| g.dims().first() == Some(&layers));
    let layer_bytes = stacked.iter().map(|g| size_of::<f32>() * g.elements() / layers).sum();
    let buckets = ranges(layers, layer_bytes, full).into_iter();
    let mut buckets = buckets
        .map(|range| stacked.iter().map(|g| ops::rows(g, range.clone())).collect::<Result<Vec<_>>>())
        .collect::<Result<Vec<_>>>()?;
    let rest = rest.into_iter().map(Tensor::detach);
    match buckets.last_mut() {
        // The lowest layers and the rest settle at nearly the same time.
        Some(lowest) => lowest.extend(rest),
        None => buckets.push(rest.collect()),
    }
    buckets.retain(|bucket| !bucket.is_empty());
    Ok(buckets)
}

/// Layers from the top down, in each range as many as fit.
fn ranges(layers: usize, layer_bytes: usize, full: usize) -> Vec<Range<usize>> {
    let each = (full / layer_bytes.max(1)).clamp(1, layers.max(1));
    (0..layers).step_by(each).map(|from| layers.saturating_sub(from + each)..layers - from).collect()
}

#[cfg(test)]
mod tests {
    use armt::Model;
    use armt::engine::{DType, Device, Tape};
    use armt::random::Random;
    use armt::recurrence::Targets;
    use armt::schedule::{Backprop, ScheduleKind};
    use armt::segment::Batch;
    use serde_json::json;

    use super::*;

    #[test]
    fn layers_are_put_together_from_the_top_until_a_bucket_is_full() {
        assert_eq!(ranges(8, 8 << 20, FULL), [5..8, 2..5, 0..2]);
        assert_eq!(ranges(8, 9 << 20, FULL), [6..8, 4..6, 2..4, 0..2]);
        assert_eq!(ranges(3, FULL, FULL), [2..3, 1..2, 0..1]);
        assert_eq!(ranges(3, 10 * FULL, FULL), [2..3, 1..2, 0..1]);
        assert_eq!(ranges(4, 100, FULL), vec![0..4; 1]);
        assert_eq!(ranges(4, 0, FULL), vec![0..4; 1]);
        assert!(ranges(0, 100, FULL).is_empty());
    }

    #[test]
    fn every_element_is_in_one_bucket() {
        let param = |name: &str, shape: &[usize]| {
            Param::new(name, &Tensor::zeros(shape, DType::F32, &Device::cpu()).unwrap(), DType::F32).unwrap()
        };
        // Layers of 12 MiB: two a bucket.
        let params = [param("embedding", &[7, 5]), param("weight", &[3, 3 << 20]), param("bias", &[3, 2]), param("scale", &[1])];
        let buckets = plan(params.iter(), 3).unwrap();
        let shapes: Vec<Vec<&[usize]>> = buckets.iter().map(|b| b.iter().map(Tensor::dims).collect()).collect();
        assert_eq!(shapes, [vec![&[2, 3 << 20][..], &[2, 2]], vec![&[1, 3 << 20], &[1, 2], &[7, 5], &[1]]]);
        for (n, tensor) in buckets.iter().flatten().enumerate() {
            tensor.overwrite(&vec![n as f32 + 1.0; tensor.elements()]).unwrap();
        }
        let told = |p: &Param| p.grad().unwrap().to_vec::<f32>().unwrap();
        assert_eq!(told(&params[2]), [4.0, 4.0, 2.0, 2.0, 2.0, 2.0]);
        assert!(params.iter().flat_map(told).all(|value| value > 0.0));
        assert_eq!(plan(params[..1].iter(), 3).unwrap().len(), 1);
    }

    /// What a real way back settles early: all layers but the lowest, before the embedding, under both schedules. What is told is whole.
    #[test]
    fn upper_layers_are_whole_before_the_embedding_is() {
        let backbone = json!({"model_type": "gpt2", "vocab_size": 23, "n_positions": 16, "n_embd": 16, "n_layer": 4, "n_head": 2});
        let memory = json!({"kind": "associative", "tokens": 2, "d_mem": 4});
        let config = json!({"model_type": "armt", "segment_size": 5, "memory": memory, "backbone": backbone});
        let model = Model::fresh(serde_json::from_value(config).unwrap(), 3, DType::F32, &Device::cpu()).unwrap();
        let params = || model.params().into_iter();
        let buckets = plan_of(params(), 4, 1).unwrap();
        assert_eq!(buckets.len(), 4);
        let mut random = Random::new(5);
        let ids: Vec<i32> = (0..60).map(|_| random.below(23) as i32).collect();
        let targets = Targets::shifted(&ids, None, 2);
        let batch = Batch { ids, texts: 2, mask: None }; // six segments
        let embedding = params().find(|p| p.value().dims() == [23, 16]).unwrap();
        let told = |bucket: &[Tensor]| bucket.iter().flat_map(|t| t.to_vec::<f32>().unwrap()).collect::<Vec<_>>();
        for schedule in [ScheduleKind::Sequential, ScheduleKind::Diagonal] {
            params().for_each(|p| p.zero_grad().unwrap());
            let (tape, empty) = (Tape::new(), model.empty(2).unwrap());
            let (loss, _) = model.loss(&tape, &batch, &targets, &empty, schedule, Backprop::default()).unwrap();
            let mut seen = Vec::new();
            tape.backward_telling(&loss, &buckets, &mut |n| {
                seen.push((told(&buckets[n]), embedding.grad()?.to_vec::<f32>()?));
                Ok(())
            })
            .unwrap();
            let whole = embedding.grad().unwrap().to_vec::<f32>().unwrap();
            for (n, (bucket, embedded)) in seen.iter().enumerate() {
                assert!(*bucket == told(&buckets[n]), "bucket {n} is whole when it is told");
                assert_eq!(*embedded == whole, n == 3, "bucket {n}: only the lowest has to wait for the embedding");
            }
            assert_eq!(seen.len(), 4);
        }
    }
}
