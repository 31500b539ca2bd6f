//! The library's errors as Python's, with the same words: the classes of `armt.errors`.

use std::io::ErrorKind;

use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

/// The result of everything that was called from Python.
pub type Result<T, E = Failure> = std::result::Result<T, E>;

/// Why a call failed.
pub enum Failure {
    /// The library refused or failed.
    Lab(armt_lab::Error),
    /// A name of a model or recipe.
    Shipped(armt_shipped::Error),
    /// Something in Python: an exception of a callback, Ctrl-C.
    Python(PyErr),
}

impl From<armt::Error> for Failure {
    fn from(error: armt::Error) -> Self {
        Failure::Lab(error.into())
    }
}

impl From<armt_lab::Error> for Failure {
    fn from(error: armt_lab::Error) -> Self {
        Failure::Lab(error)
    }
}

impl From<armt::engine::Error> for Failure {
    fn from(error: armt::engine::Error) -> Self {
        Failure::Lab(error.into())
    }
}

impl From<armt_shipped::Error> for Failure {
    fn from(error: armt_shipped::Error) -> Self {
        Failure::Shipped(error)
    }
}

impl From<PyErr> for Failure {
    fn from(error: PyErr) -> Self {
        Failure::Python(error)
    }
}

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Python(error) => error,
            Failure::Shipped(error) => of_class("NotFoundError", error.to_string()),
            Failure::Lab(armt_lab::Error::Interrupted) => PyKeyboardInterrupt::new_err(()),
            Failure::Lab(error) => match raised_in(&error) {
                Some(own) => own,
                None => of_class(class(&error), error.to_string()),
            },
        }
    }
}

/// Refuses arguments, in the library's words.
pub fn refuse(expected: impl std::fmt::Display, got: impl std::fmt::Display) -> Failure {
    armt::Error::input(expected, got).into()
}

/// The class of `armt.errors` that an error is of.
fn class(error: &armt_lab::Error) -> &'static str {
    use armt::Error as Model;
    use armt_lab::Error as Lab;
    let of_io = |e: &std::io::Error| if e.kind() == ErrorKind::NotFound { "NotFoundError" } else { "FileError" };
    match error {
        Lab::Model(Model::Io { source, .. }) | Lab::Io { source, .. } => of_io(source),
        Lab::Model(Model::File { .. }) | Lab::File { .. } => "FileError",
        Lab::Model(Model::Foreign { .. } | Model::StateFile(_)) => "MemoryFileError",
        Lab::Model(Model::Config { .. } | Model::Input { .. } | Model::Token { .. } | Model::Texts { .. }) => "InputError",
        Lab::Config { .. } | Lab::Recipe { .. } | Lab::Toml(_) | Lab::Input { .. } | Lab::Unfit { .. } => "InputError",
        _ => "Error",
    }
}

/// What Python itself raised while a text was read from it.
fn raised_in(error: &armt_lab::Error) -> Option<PyErr> {
    let armt_lab::Error::Model(armt::Error::Io { source, .. }) = error else { return None };
    let own = source.get_ref()?.downcast_ref::<PyErr>()?;
    Some(Python::attach(|py| own.clone_ref(py)))
}

fn of_class(name: &'static str, words: String) -> PyErr {
    static ERRORS: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    Python::attach(|py| {
        let module = ERRORS.get_or_try_init(py, || PyModule::import(py, "armt.errors").map(Bound::unbind));
        let class = module.and_then(|module| Ok(module.bind(py).getattr(name)?.cast_into::<PyType>()?));
        class.map_or_else(|error| error, |class| PyErr::from_type(class, words))
    })
}
