/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* Allocation counters of the engine. */
#ifndef IWARP_RUNTIME_H
#define IWARP_RUNTIME_H

#include <linux/atomic.h>

#include "engine.h"

extern atomic_long_t iwarp_allocations;
extern atomic_long_t iwarp_frees;

/* Returns the number of allocations that are not freed yet. */
static inline long iwarp_live(void)
{
	return atomic_long_read(&iwarp_allocations) - atomic_long_read(&iwarp_frees);
}

#endif
