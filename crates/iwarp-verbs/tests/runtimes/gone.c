/* Go compiles the C files of its folder, and has a `main` of its own. */
#define main gone_main
#include "gone.inc"
