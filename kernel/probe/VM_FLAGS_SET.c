// SPDX-License-Identifier: MIT OR Apache-2.0
/* The flags of a mapping are changed by vm_flags_set(). */
#include <linux/mm.h>

static inline void probe(struct vm_area_struct *area)
{
	vm_flags_set(area, VM_DONTEXPAND);
}
