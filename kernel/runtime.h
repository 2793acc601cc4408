/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* The runtime's own figures. */
#ifndef IWARP_RUNTIME_H
#define IWARP_RUNTIME_H

#include <linux/atomic.h>

#include "engine.h"

extern atomic_long_t iwarp_allocations;
extern atomic_long_t iwarp_frees;

/* Allocations that are not freed yet. */
static inline long iwarp_live(void)
{
	return atomic_long_read(&iwarp_allocations) - atomic_long_read(&iwarp_frees);
}

#endif
