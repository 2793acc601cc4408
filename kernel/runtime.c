// SPDX-License-Identifier: MIT OR Apache-2.0
/* The functions that the engine calls, except for completions, which belong to the module. */
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

static int fail_allocation;
module_param(fail_allocation, int, 0644);
MODULE_PARM_DESC(fail_allocation,
		 "For tests: the engine's n-th allocation from now on fails; 0: none");

/* Returns true if this is the allocation that has to fail. */
static bool shall_fail(void)
{
	int left = READ_ONCE(fail_allocation);

	while (left > 0)
		if (try_cmpxchg(&fail_allocation, &left, left - 1))
			return left == 1;
	return false;
}

/* Objects are created in process context only. Large rings come from vmalloc. */
void *iwarp_alloc(size_t size, size_t align, bool zeroed)
{
	void *at;

	might_sleep();
	if (shall_fail())
		return NULL;
	/* Allocations of a power of two are aligned to their size. */
	if (align > ARCH_KMALLOC_MINALIGN)
		size = roundup_pow_of_two(max(size, align));
	at = kvmalloc(size, zeroed ? GFP_KERNEL | __GFP_ZERO : GFP_KERNEL);
	if (at)
		atomic_long_inc(&iwarp_allocations);
	return at;
}

void iwarp_free(void *at)
{
	might_sleep();
	atomic_long_inc(&iwarp_frees);
	kvfree(at);
}

/* The caller raises an invalid-opcode exception afterwards, as BUG() does. */
void iwarp_panic(const char *text, size_t text_len, const char *file, size_t file_len, u32 line)
{
	pr_emerg("iwarp: panic at %.*s:%u: %.*s\n", (int)file_len, file, line, (int)text_len, text);
}

/*
 * The engine continues finished CRCs; the kernel's function inverts neither its input nor its
 * result.
 */
u32 iwarp_crc32c(u32 crc, const u8 *octets, size_t len)
{
	return ~crc32c(~crc, octets, len);
}
