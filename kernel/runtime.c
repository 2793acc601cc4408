// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * The functions that the engine calls, except for iwarp_complete() and iwarp_take_receive(), which
 * each module defines for its own objects.
 */
#include <linux/crc32c.h>
#include <linux/kernel.h>
#include <linux/log2.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/printk.h>
#include <linux/slab.h>

#include "runtime.h"

atomic_long_t iwarp_allocations;
atomic_long_t iwarp_frees;

#define GFP (GFP_KERNEL_ACCOUNT | __GFP_RETRY_MAYFAIL | __GFP_NOWARN)

#ifdef IWARP_FAULTS
static int fail_allocation;
module_param(fail_allocation, int, 0644);
MODULE_PARM_DESC(fail_allocation,
		 "For tests: the engine's n-th allocation from now on fails; 0: none");

/* Returns true if this is the allocation that `fail_allocation` selects. */
static bool inject_failure(void)
{
	int remaining = READ_ONCE(fail_allocation);

	while (remaining > 0)
		if (try_cmpxchg(&fail_allocation, &remaining, remaining - 1))
			return remaining == 1;
	return false;
}
#else
static bool inject_failure(void)
{
	return false;
}
#endif

/*
 * Called in process context only. Uses kvmalloc() because rings can be large. The memory is charged
 * to the caller's memory cgroup; if its limit is reached, the allocation fails and nothing is
 * killed.
 */
void *iwarp_alloc(size_t size, size_t align, bool zeroed)
{
	void *ptr;

	might_sleep();
	if (inject_failure())
		return NULL;
	/* kvmalloc() aligns an allocation to its size if that is a power of two. */
	if (align > ARCH_KMALLOC_MINALIGN)
		size = roundup_pow_of_two(max(size, align));
	ptr = kvmalloc(size, GFP | (zeroed ? __GFP_ZERO : 0));
	if (ptr)
		atomic_long_inc(&iwarp_allocations);
	return ptr;
}

void iwarp_free(void *ptr)
{
	might_sleep();
	atomic_long_inc(&iwarp_frees);
	kvfree(ptr);
}

/* The caller raises an invalid-opcode exception afterwards, as BUG() does. */
void iwarp_panic(const char *text, size_t text_len, const char *file, size_t file_len, u32 line)
{
	pr_emerg("iwarp: panic at %.*s:%u: %.*s\n", (int)file_len, file, line, (int)text_len, text);
}

/*
 * The engine passes and expects finished CRCs, which are inverted. The kernel's function inverts
 * neither its input nor its result.
 */
u32 iwarp_crc32c(u32 crc, const u8 *octets, size_t len)
{
	return ~crc32c(~crc, octets, len);
}
