// DPFP and the associative memory.
