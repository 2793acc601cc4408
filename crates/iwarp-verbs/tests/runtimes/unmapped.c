/* cgo compiles every C file in the package's directory, and the Go program has its own `main`. */
#define main unmapped_main
#include "unmapped.inc"
