// SPDX-License-Identifier: MIT OR Apache-2.0
/* The code of the tracepoints that trace.h declares. */
#define CREATE_TRACE_POINTS
#include "trace.h"
