//! The Python package `armt`: the library's values as Python's. What a person sees of it is in `python/armt`: stubs, errors, `armt.ray`.
//!
//! Every computation runs without Python's lock, on threads of its caller's own; Ctrl-C is looked for between groups of segments, tokens
//! and steps. A memory is the bytes of its file, so that it can be copied, pickled and kept in tables, and is bound to a model only when
//! it is used.

mod error;
mod memory;
mod model;
mod research;
mod source;
mod speech;
mod threads;
mod training;

use pyo3::prelude::*;

#[pymodule(gil_used = false)]
fn _armt(module: &Bound<'_, PyModule>) -> PyResult<()> {
    armt_lab::carried::carry(armt_shipped::CARRIED);
    // Here, and not by whoever makes the first array, so that a numpy that is missing is an ImportError.
    module.py().import("numpy")?;
    drop(numpy::PyArray1::<f32>::zeros(module.py(), 0, false));
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<memory::Memory>()?;
    module.add_class::<model::Model>()?;
    module.add_class::<speech::Stream>()?;
    module.add_class::<research::TrainableModel>()?;
    module.add_class::<training::Recipe>()?;
    module.add_function(wrap_pyfunction!(training::train, module)?)?;
    module.add_function(wrap_pyfunction!(training::write_babilong, module)?)?;
    module.add_function(wrap_pyfunction!(threads::set_threads, module)?)?;
    module.add_function(wrap_pyfunction!(threads::get_threads, module)?)?;
    Ok(())
}
