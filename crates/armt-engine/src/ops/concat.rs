//! Tensors joined along one axis.
