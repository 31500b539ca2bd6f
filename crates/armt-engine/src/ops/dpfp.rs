//! DPFP-nu.
