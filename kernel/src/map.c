// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * Memory of queues. Rings that are shared with a program come from vmalloc_user(); the program maps
 * them by a key. Rings of kernel clients are not shared.
 */
#include <linux/mm.h>
#include <linux/slab.h>
#include <linux/vmalloc.h>
#include <rdma/uverbs_ioctl.h>

#include "rnic.h"

/* rdma-core uses the key of page 0 for "no key". Keys begin after it. */
#define FIRST_PAGE (SIW_INVAL_UOBJ_KEY / PAGE_SIZE + 1)

struct mapping {
	struct rdma_user_mmap_entry base;
	void *at;
};

/*
 * Allocates zeroed memory that a program can map by the key. Removing the entry frees it when no
 * mmap call uses it, because such a call holds a reference.
 */
static void *share(struct rnic_ucontext *context, size_t octets,
		   struct rdma_user_mmap_entry **entry, u64 *key)
{
	struct mapping *mapping = kzalloc(sizeof(*mapping), GFP_KERNEL);

	*key = SIW_INVAL_UOBJ_KEY;
	if (!mapping)
		return NULL;
	mapping->at = vmalloc_user(octets);
	if (!mapping->at ||
	    rdma_user_mmap_entry_insert_range(&context->base, &mapping->base, octets, FIRST_PAGE,
					      U32_MAX)) {
		vfree(mapping->at);
		kfree(mapping);
		return NULL;
	}
	*key = rdma_user_mmap_get_offset(&mapping->base);
	*entry = &mapping->base;
	return mapping->at;
}

/* Returns the context of the calling program, or NULL for a kernel client. */
struct rnic_ucontext *rnic_context_of(struct ib_udata *udata)
{
	return udata ? rdma_udata_to_drv_context(udata, struct rnic_ucontext, base) : NULL;
}

/*
 * Allocates zeroed memory for a queue: shared with the program, or without a mapping for a kernel
 * client.
 */
void *rnic_queue_memory(struct rnic_ucontext *context, size_t octets,
			struct rdma_user_mmap_entry **mapping, u64 *key)
{
	return context ? share(context, octets, mapping, key) : kvzalloc(octets, GFP_KERNEL);
}

void rnic_queue_memory_free(void *at, struct rdma_user_mmap_entry *mapping)
{
	if (mapping)
		rdma_user_mmap_entry_remove(mapping);
	else
		kvfree(at);
}

int rnic_mmap(struct ib_ucontext *context, struct vm_area_struct *area)
{
	struct rdma_user_mmap_entry *entry;
	int result;

	if (PAGE_ALIGN(area->vm_end - area->vm_start) != area->vm_end - area->vm_start)
		return -EINVAL;
	/* Checks offset and length, too. */
	entry = rdma_user_mmap_entry_get(context, area);
	if (!entry)
		return -EINVAL;
	result = remap_vmalloc_range(area, container_of(entry, struct mapping, base)->at, 0);
	rdma_user_mmap_entry_put(entry);
	return result;
}

void rnic_mmap_free(struct rdma_user_mmap_entry *entry)
{
	struct mapping *mapping = container_of(entry, struct mapping, base);

	vfree(mapping->at);
	kfree(mapping);
}
