// A kernel that fails on purpose, for the tests of error handling.
extern "C" __global__ void trap() { asm volatile("trap;"); }
