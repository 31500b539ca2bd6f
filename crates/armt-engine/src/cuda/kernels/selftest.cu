// A kernel that fails on purpose, for the tests of error handling.
KERNEL(trap)() { asm volatile("trap;"); }
