//! cuBLASLt: every matrix product on the GPU, with bias and GELU fused where the library can.
//!
//! Ours are row-major, the library's column-major: D = A B is asked for as D^T = B^T A^T, which only swaps the operands.
//! A product's plan (descriptors and suggested algorithms) is made once for its sizes, types, strides and alignment, and reused.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::path::PathBuf;

use super::driver::Context;
use super::libraries::{self, c_api};
use crate::error::{Error, Result};
use crate::tensor::DType;

type Handle = *mut c_void;

/// An algorithm as the library describes it; opaque.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Algorithm([u64; 8]);

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Heuristic {
    algorithm: Algorithm,
    workspace: usize,
    state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

c_api! {
    /// Functions of `libcublasLt`, the same in CUDA 12 and 13.
    Api {
        fn cublasLtCreate(handle: *mut Handle) -> c_int;
        fn cublasLtDestroy(handle: Handle) -> c_int;
        fn cublasLtGetVersion() -> usize;
        fn cublasLtMatmulDescCreate(desc: *mut Handle, compute: c_int, scale: c_int) -> c_int;
        fn cublasLtMatmulDescDestroy(desc: Handle) -> c_int;
        fn cublasLtMatmulDescSetAttribute(desc: Handle, attribute: c_int, value: *const c_void, size: usize) -> c_int;
        fn cublasLtMatrixLayoutCreate(layout: *mut Handle, dtype: c_int, rows: u64, cols: u64, ld: i64) -> c_int;
        fn cublasLtMatrixLayoutDestroy(layout: Handle) -> c_int;
        fn cublasLtMatrixLayoutSetAttribute(layout: Handle, attribute: c_int, value: *const c_void, size: usize) -> c_int;
        fn cublasLtMatmulPreferenceCreate(preference: *mut Handle) -> c_int;
        fn cublasLtMatmulPreferenceDestroy(preference: Handle) -> c_int;
        fn cublasLtMatmulPreferenceSetAttribute(preference: Handle, attribute: c_int, value: *const c_void, size: usize) -> c_int;
        fn cublasLtMatmulAlgoGetHeuristic(
            handle: Handle, desc: Handle, a: Handle, b: Handle, c: Handle, d: Handle, preference: Handle, asked: c_int,
            results: *mut Heuristic, found: *mut c_int,
        ) -> c_int;
        fn cublasLtMatmul(
            handle: Handle, desc: Handle, alpha: *const c_void, a: u64, a_layout: Handle, b: u64, b_layout: Handle,
            beta: *const c_void, c: u64, c_layout: Handle, d: u64, d_layout: Handle, algorithm: *const Algorithm, workspace: u64,
            workspace_bytes: usize, stream: Handle,
        ) -> c_int;
    }
}

const COMPUTE_F32: c_int = 68;
const TYPE_F32: c_int = 0;
const TYPE_BF16: c_int = 14;
const DESC_TRANSPOSE_A: c_int = 3;
const DESC_TRANSPOSE_B: c_int = 4;
const DESC_EPILOGUE: c_int = 7;
const DESC_BIAS_POINTER: c_int = 8;
const DESC_BIAS_STRIDE: c_int = 10;
const DESC_AUX_POINTER: c_int = 11;
const DESC_AUX_LD: c_int = 12;
const DESC_AUX_STRIDE: c_int = 13;
const LAYOUT_BATCH: c_int = 5;
const LAYOUT_STRIDE: c_int = 6;
const PREFERENCE_WORKSPACE: c_int = 1;
const PREFERENCE_ALIGN_A: c_int = 5;

/// Scratch memory for split products; what NVIDIA recommends for Hopper.
pub(super) const WORKSPACE: usize = 32 << 20;

/// One operand or result: where it is and how it is stored.
#[derive(Clone, Copy)]
pub(crate) struct Matrix {
    /// Device address.
    pub(crate) ptr: u64,
    /// Element type.
    pub(crate) dtype: DType,
    /// Stored with its two axes swapped.
    pub(crate) transposed: bool,
    /// Elements between the matrices of a batch; 0 to use one for all.
    pub(crate) stride: usize,
}

/// What follows the product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Epilogue {
    /// Nothing.
    None,
    /// Add a bias `[batch, n]`.
    Bias,
    /// Add a bias and apply GELU (tanh form).
    BiasGelu,
    /// Bias and GELU, also storing the values before GELU for the backward pass.
    BiasGeluAux,
}

/// A batched row-major product: `d = alpha op(a) op(b) + beta c`, with an epilogue.
#[derive(Clone, Copy)]
pub(crate) struct Product {
    /// Rows of d.
    pub(crate) m: usize,
    /// Columns of d.
    pub(crate) n: usize,
    /// Summed axis.
    pub(crate) k: usize,
    /// Number of products.
    pub(crate) batch: usize,
    /// `[m, k]`, or `[k, m]` if transposed.
    pub(crate) a: Matrix,
    /// `[k, n]`, or `[n, k]` if transposed.
    pub(crate) b: Matrix,
    /// `[m, n]`, of the same type and stride as d; added when present.
    pub(crate) c: Option<u64>,
    /// `[m, n]`.
    pub(crate) d: Matrix,
    /// Scale of the product.
    pub(crate) alpha: f32,
    /// What follows.
    pub(crate) epilogue: Epilogue,
    /// Address of the bias, and elements between the biases of a batch.
    pub(crate) bias: (u64, usize),
    /// Where [`Epilogue::BiasGeluAux`] stores; `[m, n]` like d.
    pub(crate) aux: u64,
}

/// What two products must have in common to run by one plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    sizes: [usize; 4],
    a: (DType, bool, usize, u32),
    b: (DType, bool, usize, u32),
    d: (DType, usize, u32),
    c: Option<u32>,
    epilogue: Epilogue,
    bias_stride: usize,
}

impl Product {
    pub(super) fn key(&self) -> Key {
        Key {
            sizes: [self.m, self.n, self.k, self.batch],
            a: (self.a.dtype, self.a.transposed, self.a.stride, alignment(self.a.ptr)),
            b: (self.b.dtype, self.b.transposed, self.b.stride, alignment(self.b.ptr)),
            d: (self.d.dtype, self.d.stride, alignment(self.d.ptr)),
            c: self.c.map(alignment),
            epilogue: self.epilogue,
            bias_stride: self.bias.1,
        }
    }

    /// Whether it stores a second result.
    pub(super) fn aux_stored(&self) -> bool {
        self.epilogue == Epilogue::BiasGeluAux
    }
}

/// Algorithms that the library is asked for.
const SUGGESTIONS: usize = 8;

/// What is known about a product when it is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Planned {
    /// The library has no algorithm for it.
    Never,
    /// It was asked for before.
    Before,
    /// It is new, with so many algorithms to choose from.
    Now(usize),
}

struct Plan {
    desc: Handle,
    a: Handle,
    b: Handle,
    d: Handle,
    /// The library's suggestions, best first.
    algorithms: Vec<Algorithm>,
    /// Which of them to take.
    choice: usize,
}

/// The library and its plans.
pub(super) struct Blas {
    api: Api,
    handle: Handle,
    plans: HashMap<Key, Option<Plan>>,
    workspace: u64,
    pub(super) path: PathBuf,
    pub(super) version: usize,
}

// SAFETY: the handle and the descriptors are plain heap objects of the library; `Blas` is used behind a mutex.
unsafe impl Send for Blas {}

/// Largest power of two up to 256 that divides an address.
fn alignment(ptr: u64) -> u32 {
    1 << ptr.trailing_zeros().min(8)
}

fn type_of(dtype: DType) -> Result<c_int> {
    match dtype {
        DType::F32 => Ok(TYPE_F32),
        DType::BF16 => Ok(TYPE_BF16),
        DType::I32 | DType::I8 => {
            Err(Error::DType { op: "matmul", what: "an operand", expected: "f32 or bf16".into(), got: dtype })
        }
    }
}

fn check(call: &'static str, code: c_int) -> Result<()> {
    if code == 0 {
        return Ok(());
    }
    let name = match code {
        1 => "NOT_INITIALIZED",
        3 => "ALLOC_FAILED",
        7 => "INVALID_VALUE",
        8 => "ARCH_MISMATCH",
        11 => "MAPPING_ERROR",
        13 => "EXECUTION_FAILED",
        14 => "INTERNAL_ERROR",
        15 => "NOT_SUPPORTED",
        _ => "unknown status",
    };
    Err(Error::Cuda { call, code, name: name.into(), text: "cuBLASLt".into() })
}

fn as_bytes<T>(value: &T) -> (*const c_void, usize) {
    ((value as *const T).cast(), size_of::<T>())
}

impl Blas {
    pub(super) fn load(context: &Context, majors: &[u32], workspace: u64) -> Result<Self> {
        let loaded = libraries::find("cublasLt", majors)?;
        let path = loaded.path.clone();
        let api = Api::load(loaded)?;
        context.bind()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes a handle to a live variable; the context is current.
        check("cublasLtCreate", unsafe { (api.cublasLtCreate)(&mut handle) })?;
        // SAFETY: takes no argument.
        let version = unsafe { (api.cublasLtGetVersion)() };
        Ok(Blas { api, handle, plans: HashMap::new(), workspace, path, version })
    }

    /// Makes a product's plan, if there is none yet. For a plain product a missing algorithm is an error; with an epilogue the caller asks
    /// again without one.
    pub(super) fn prepare(&mut self, p: &Product) -> Result<Planned> {
        let planned = match self.plans.get(&p.key()) {
            Some(Some(_)) => Planned::Before,
            Some(None) => Planned::Never,
            None => {
                let plan = self.plan(p)?;
                let planned = plan.as_ref().map_or(Planned::Never, |plan| Planned::Now(plan.algorithms.len()));
                self.plans.insert(p.key(), plan);
                planned
            }
        };
        if planned == Planned::Never && p.epilogue == Epilogue::None {
            return Err(Error::unsupported(
                "matmul",
                format!("cuBLASLt has no algorithm for {} x [{}, {}] [{}, {}] of {}", p.batch, p.m, p.k, p.k, p.n, p.a.dtype),
            ));
        }
        Ok(planned)
    }

    /// Sets which algorithm a planned product runs with.
    pub(super) fn settle(&mut self, p: &Product, choice: usize) {
        if let Some(Some(plan)) = self.plans.get_mut(&p.key()) {
            plan.choice = choice;
        }
    }

    /// Issues a planned product.
    pub(super) fn run(&self, context: &Context, p: &Product) -> Result<()> {
        let choice = self.plans.get(&p.key()).and_then(Option::as_ref).map_or(0, |plan| plan.choice);
        self.try_suggestion(context, p.key(), p, choice).or_else(|e| {
            // An earlier kernel's failure shows here first, and the driver knows more about it.
            if !context.is_capturing() {
                context.synchronize()?;
            }
            Err(e)
        })
    }

    /// Issues a product with one of its plan's suggestions. `p` may have other results than the product that was planned, at least as well
    /// aligned.
    pub(super) fn try_suggestion(&self, context: &Context, planned: Key, p: &Product, suggestion: usize) -> Result<()> {
        match self.plans.get(&planned) {
            Some(Some(plan)) => self.issue_with(context, plan, &plan.algorithms[suggestion], p),
            _ => Err(Error::Bug("a matrix product has no plan".into())),
        }
    }

    fn issue_with(&self, context: &Context, plan: &Plan, algorithm: &Algorithm, p: &Product) -> Result<()> {
        context.bind()?;
        if p.epilogue != Epilogue::None {
            self.set(plan.desc, DESC_BIAS_POINTER, &p.bias.0)?;
        }
        if p.aux_stored() {
            self.set(plan.desc, DESC_AUX_POINTER, &p.aux)?;
        }
        let beta = if p.c.is_some() { 1f32 } else { 0f32 };
        // SAFETY: the plan's layouts describe the buffers, which the caller has checked to be large enough; scalars are on the host.
        let code = unsafe {
            (self.api.cublasLtMatmul)(
                self.handle,
                plan.desc,
                as_bytes(&p.alpha).0,
                p.b.ptr,
                plan.a,
                p.a.ptr,
                plan.b,
                as_bytes(&beta).0,
                p.c.unwrap_or(p.d.ptr),
                plan.d,
                p.d.ptr,
                plan.d,
                algorithm,
                self.workspace,
                WORKSPACE,
                context.stream(),
            )
        };
        check("cublasLtMatmul", code)
    }

    fn set<T>(&self, desc: Handle, attribute: c_int, value: &T) -> Result<()> {
        let (value, size) = as_bytes(value);
        // SAFETY: the value is live and of the size that the attribute has in the library's header.
        check("cublasLtMatmulDescSetAttribute", unsafe { (self.api.cublasLtMatmulDescSetAttribute)(desc, attribute, value, size) })
    }

    fn layout(&self, dtype: DType, rows: usize, cols: usize, batch: usize, stride: usize) -> Result<Handle> {
        let mut layout = std::ptr::null_mut();
        // SAFETY: as `set`; the layout is created before it is changed.
        unsafe {
            let code = (self.api.cublasLtMatrixLayoutCreate)(&mut layout, type_of(dtype)?, rows as u64, cols as u64, rows as i64);
            check("cublasLtMatrixLayoutCreate", code)?;
            let (batch, stride) = (batch as i32, stride as i64);
            let set = self.api.cublasLtMatrixLayoutSetAttribute;
            check("cublasLtMatrixLayoutSetAttribute", set(layout, LAYOUT_BATCH, as_bytes(&batch).0, 4))?;
            check("cublasLtMatrixLayoutSetAttribute", set(layout, LAYOUT_STRIDE, as_bytes(&stride).0, 8))?;
        }
        Ok(layout)
    }

    /// A plan, or `None` if the library has no algorithm. Plans live as long as the library.
    fn plan(&self, p: &Product) -> Result<Option<Plan>> {
        let mut desc = std::ptr::null_mut();
        // SAFETY: writes a handle to a live variable.
        check("cublasLtMatmulDescCreate", unsafe { (self.api.cublasLtMatmulDescCreate)(&mut desc, COMPUTE_F32, TYPE_F32) })?;
        self.set(desc, DESC_TRANSPOSE_A, &(p.b.transposed as i32))?;
        self.set(desc, DESC_TRANSPOSE_B, &(p.a.transposed as i32))?;
        let epilogue: i32 = match p.epilogue {
            Epilogue::None => 1,
            Epilogue::Bias => 4,
            Epilogue::BiasGelu => 36,
            Epilogue::BiasGeluAux => 164,
        };
        self.set(desc, DESC_EPILOGUE, &epilogue)?;
        if p.epilogue != Epilogue::None {
            self.set(desc, DESC_BIAS_POINTER, &p.bias.0)?;
            self.set(desc, DESC_BIAS_STRIDE, &(p.bias.1 as i64))?;
        }
        if p.epilogue == Epilogue::BiasGeluAux {
            self.set(desc, DESC_AUX_POINTER, &p.aux)?;
            self.set(desc, DESC_AUX_LD, &(p.n as i64))?;
            self.set(desc, DESC_AUX_STRIDE, &(p.d.stride as i64))?;
        }
        let stored = |transposed: bool, rows: usize, cols: usize| if transposed { (cols, rows) } else { (rows, cols) };
        let (b_rows, b_cols) = stored(p.b.transposed, p.n, p.k);
        let (a_rows, a_cols) = stored(p.a.transposed, p.k, p.m);
        let a = self.layout(p.b.dtype, b_rows, b_cols, p.batch, p.b.stride)?;
        let b = self.layout(p.a.dtype, a_rows, a_cols, p.batch, p.a.stride)?;
        let d = self.layout(p.d.dtype, p.n, p.m, p.batch, p.d.stride)?;
        let mut preference = std::ptr::null_mut();
        let mut results = [Heuristic::default(); SUGGESTIONS];
        let mut found = 0;
        // SAFETY: handles are live; `results` has room for as many as are asked for.
        unsafe {
            check("cublasLtMatmulPreferenceCreate", (self.api.cublasLtMatmulPreferenceCreate)(&mut preference))?;
            let set = |attribute, value: *const c_void, size| {
                let code = (self.api.cublasLtMatmulPreferenceSetAttribute)(preference, attribute, value, size);
                check("cublasLtMatmulPreferenceSetAttribute", code)
            };
            set(PREFERENCE_WORKSPACE, as_bytes(&WORKSPACE).0, 8)?;
            let aligned = [p.b.ptr, p.a.ptr, p.c.unwrap_or(p.d.ptr), p.d.ptr].map(alignment);
            for (i, value) in aligned.iter().enumerate() {
                set(PREFERENCE_ALIGN_A + i as c_int, as_bytes(value).0, 4)?;
            }
            let code = (self.api.cublasLtMatmulAlgoGetHeuristic)(
                self.handle,
                desc,
                a,
                b,
                d,
                d,
                preference,
                results.len() as c_int,
                results.as_mut_ptr(),
                &mut found,
            );
            (self.api.cublasLtMatmulPreferenceDestroy)(preference);
            if code != 0 || found == 0 || results[0].state != 0 {
                (self.api.cublasLtMatmulDescDestroy)(desc);
                for layout in [a, b, d] {
                    (self.api.cublasLtMatrixLayoutDestroy)(layout);
                }
                return Ok(None);
            }
        }
        let usable = results.iter().take(found as usize).filter(|r| r.state == 0);
        Ok(Some(Plan { desc, a, b, d, algorithms: usable.map(|r| r.algorithm).collect(), choice: 0 }))
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        // SAFETY: every handle was created by this library and is destroyed once.
        unsafe {
            for plan in self.plans.values().flatten() {
                (self.api.cublasLtMatmulDescDestroy)(plan.desc);
                for layout in [plan.a, plan.b, plan.d] {
                    (self.api.cublasLtMatrixLayoutDestroy)(layout);
                }
            }
            (self.api.cublasLtDestroy)(self.handle);
        }
    }
}
