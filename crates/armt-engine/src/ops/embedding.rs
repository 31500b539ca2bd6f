//! Rows of a table: y[i] = table[ids[i]]. Its gradient adds up: dtable[v] = sum over i with ids[i] = v of dy[i].
//!
//! The sum is taken in f32 and in the order of the positions, so that it has the same bits in every run: no atomic additions. On
//! CUDA each block owns a range of the table's rows and looks through all ids for them. Small tables are summed in pieces of the
//! positions, whose sums are then added in order: a token that fills half of a batch would otherwise keep one block busy.

use half::bf16;

use super::matmul::add_sum;
use super::{cast, cuda_of};
use crate::cpu::embedding as cpu;
use crate::cuda::CudaDevice;
use crate::error::{Error, Result};
use crate::paths::{self, ScatterPieces};
use crate::tape::{Backward, Grads, Target, record};
use crate::tensor::{DType, Shape, Tensor};

const OP: &str = "embedding";

/// Rows `ids` of `table` `[V, d]`: `[.., d]` for i32 ids `[..]`. An id outside the table is an error: on the CPU at once, on CUDA
/// from the next call that waits for the device.
pub fn embedding(table: &Tensor, ids: &Tensor) -> Result<Tensor> {
    table.expect_float(OP, "the table")?;
    table.expect_rank(OP, "the table", 2)?;
    ids.expect_dtype(OP, "the ids", DType::I32)?;
    ids.expect_device_of(OP, "the ids", table)?;
    let (vocabulary, d, n) = (table.shape()[0], table.shape()[1], ids.elements());
    if vocabulary == 0 && n > 0 {
        return Err(Error::shape(OP, "the table", "[at least 1, d]", table.shape()));
    }
    let y = Tensor::uninit(Shape::new(&[ids.dims(), &[d]].concat()), table.dtype(), table.device())?;
    match cuda_of(table) {
        None => {
            let ids = ids.read::<i32>(OP)?;
            if let Some((position, id)) = cpu::outside(&ids, 0, vocabulary) {
                let range = format!("the table of {vocabulary} rows");
                return Err(Error::Index { op: OP, what: "id", value: id.into(), position: Some(position), range });
            }
            match table.dtype() {
                DType::BF16 => cpu::gather(&table.read::<bf16>(OP)?, &ids, &mut y.write::<bf16>(OP)?, d),
                _ => cpu::gather(&table.read::<f32>(OP)?, &ids, &mut y.write::<f32>(OP)?, d),
            }
        }
        Some(cuda) => {
            let launch = cuda.kernel(OP, table.dtype(), "embedding")?.cover(n * 32);
            launch.arg(table).arg(ids).arg(&y).arg(n).arg(d).arg(vocabulary).arg(cuda.fault_ptr()).run()?;
        }
    }
    Ok(record(&[table], y, || Embedding { ids: ids.detach(), vocabulary, d }))
}

struct Embedding {
    ids: Tensor,
    vocabulary: usize,
    d: usize,
}

impl Backward for Embedding {
    fn backward(self: Box<Self>, grads: &mut Grads<'_>) -> Result<()> {
        let dy = grads.output(0)?;
        let Some(target) = grads.target(0)? else { return Ok(()) };
        let sizes = [self.ids.elements(), self.vocabulary, self.d];
        match cuda_of(&dy) {
            Some(cuda) => scatter(cuda, &dy, &self.ids, sizes, &target),
            None => {
                let [_, vocabulary, d] = sizes;
                let (dy, ids) = (cast(&dy, DType::F32)?, self.ids.read::<i32>(OP)?);
                let dy = dy.read::<f32>(OP)?;
                add_in_f32(&target, 1, vocabulary * d, |sum| {
                    cpu::scatter(&dy, &ids, &mut sum.write::<f32>(OP)?, d);
                    Ok(())
                })
            }
        }
    }
}

/// Calls `add` with the target where it is one f32 buffer, else with `pieces` zeroed f32 buffers whose sum then goes to the target.
fn add_in_f32(target: &Target, pieces: usize, elements: usize, add: impl FnOnce(&Tensor) -> Result<()>) -> Result<()> {
    if pieces == 1 && target.tensor.dtype() == DType::F32 {
        if !target.accumulate {
            target.tensor.fill_zero()?;
        }
        return add(&target.tensor);
    }
    let sums = Tensor::zeros([pieces, elements], DType::F32, target.tensor.device())?;
    add(&sums)?;
    add_sum(&sums, [1, pieces, elements], target)
}

fn scatter(cuda: &CudaDevice, dy: &Tensor, ids: &Tensor, [n, vocabulary, d]: [usize; 3], target: &Target) -> Result<()> {
    let tiles = d.div_ceil(256);
    let ScatterPieces { span, length, pieces } = paths::scatter_pieces(cuda.card(), [n, vocabulary, d], tiles);
    add_in_f32(target, pieces, vocabulary * d, |sums| {
        let launch = cuda.kernel(OP, dy.dtype(), "embedding_backward")?.grid(vocabulary.div_ceil(span), tiles, pieces);
        launch.arg(dy).arg(ids).arg(sums).arg(n).arg(d).arg(vocabulary).arg(span).arg(length).run()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tape::{Param, Tape};
    use crate::tensor::Device;

    fn table(rows: usize, d: usize) -> Tensor {
        let data: Vec<f32> = (0..rows * d).map(|i| i as f32).collect();
        Tensor::from_slice(&data, [rows, d], &Device::cpu()).unwrap()
    }

    #[test]
    fn an_id_outside_the_table_is_named_with_its_position() {
        for (bad, at) in [(5, 2), (-1, 0)] {
            let mut ids = [0, 4, 1];
            ids[at] = bad;
            let ids = Tensor::from_slice(&ids, [3], &Device::cpu()).unwrap();
            let message = embedding(&table(5, 2), &ids).unwrap_err().to_string();
            assert!(message.contains(&format!("id {bad} at position {at}")) && message.contains("5 rows"), "{message}");
        }
    }

    #[test]
    fn wrong_types_and_shapes_are_refused() {
        let ids = Tensor::from_slice(&[0], [1], &Device::cpu()).unwrap();
        assert!(matches!(embedding(&table(3, 2), &table(1, 1)), Err(Error::DType { .. })));
        assert!(matches!(embedding(&ids, &ids), Err(Error::DType { .. })));
        assert!(matches!(embedding(&table(3, 2).view([6]), &ids), Err(Error::Shape { .. })));
        assert!(matches!(embedding(&table(0, 2), &ids), Err(Error::Shape { .. })));
    }

    #[test]
    fn gradients_of_a_bf16_parameter_add_up_in_f32() {
        let param = Param::new("table", &table(3, 1), DType::BF16).unwrap();
        // 256 + 1 is not a bf16 number.
        let ids = Tensor::from_slice(&[1; 257], [257], &Device::cpu()).unwrap();
        for times in 1..=2 {
            let tape = Tape::new();
            let y = embedding(&tape.param(&param), &ids).unwrap();
            assert_eq!(y.dtype(), DType::BF16);
            let ones = cast(&Tensor::full(1.0, [257, 1], &Device::cpu()).unwrap(), DType::BF16).unwrap();
            tape.backward_from(&[(&y, ones)]).unwrap();
            assert_eq!(param.grad().unwrap().to_vec::<f32>().unwrap(), [0.0, 257.0 * times as f32, 0.0]);
        }
    }

    #[test]
    fn a_bf16_variable_gets_a_bf16_gradient() {
        let tape = Tape::new();
        let x = tape.variable(&cast(&table(3, 2), DType::BF16).unwrap());
        let ids = Tensor::from_slice(&[2, 0, 2], [3], &Device::cpu()).unwrap();
        let y = embedding(&x, &ids).unwrap();
        assert_eq!(y.to_f32_vec().unwrap(), [4.0, 5.0, 0.0, 1.0, 4.0, 5.0]);
        let again = embedding(&x, &ids).unwrap();
        tape.backward_from(&[(&y, y.detach()), (&again, y.detach())]).unwrap();
        let gradient = tape.grad(&x).unwrap();
        assert_eq!(gradient.dtype(), DType::BF16);
        assert_eq!(gradient.to_f32_vec().unwrap(), [0.0, 2.0, 0.0, 0.0, 16.0, 20.0]);
    }

    #[test]
    fn large_gradients_add_up_as_one_thread_would() {
        let (rows, d, n) = (40, 65, 5000);
        let ids: Vec<i32> = (0..n).map(|i| (i * i % 37 + i % 3) as i32).collect();
        let dy: Vec<f32> = (0..n * d).map(|i| ((i * 7919) % 1000) as f32 / 999.0).collect();
        let tape = Tape::new();
        let x = tape.variable(&table(rows, d));
        let y = embedding(&x, &Tensor::from_slice(&ids, [n], &Device::cpu()).unwrap()).unwrap();
        tape.backward_from(&[(&y, Tensor::from_slice(&dy, [n, d], &Device::cpu()).unwrap())]).unwrap();
        let mut want = vec![0f32; rows * d];
        for (i, &id) in ids.iter().enumerate() {
            (0..d).for_each(|c| want[id as usize * d + c] += dy[i * d + c]);
        }
        assert_eq!(tape.grad(&x).unwrap().to_vec::<f32>().unwrap(), want);
    }
}
