/* Go compiles the C files of its folder, and has a `main` of its own. */
#define main unmapped_main
#include "unmapped.inc"
