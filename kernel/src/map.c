// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * Memory of queues. A ring that is shared with a program is allocated with vmalloc_user(), and the
 * program maps it by its key. Rings of kernel clients are not shared.
 */
#include <linux/mm.h>
#include <linux/slab.h>
#include <linux/vmalloc.h>
#include <rdma/uverbs_ioctl.h>

#include "rnic.h"

/* For rdma-core, SIW_INVAL_UOBJ_KEY means "no key". Valid keys begin on the next page. */
#define FIRST_PAGE (SIW_INVAL_UOBJ_KEY / PAGE_SIZE + 1)

struct mapping {
	struct rdma_user_mmap_entry base;
	void *memory;
};

/*
 * Allocates zeroed memory that a program can map by `key`. After the entry is removed, the memory
 * is freed as soon as no mmap call uses it, because such a call holds a reference.
 */
static void *alloc_shared(struct rnic_ucontext *context, size_t octets,
			  struct rdma_user_mmap_entry **entry, u64 *key)
{
	struct mapping *mapping = kzalloc(sizeof(*mapping), GFP_KERNEL);

	*key = SIW_INVAL_UOBJ_KEY;
	if (!mapping)
		return NULL;
	mapping->memory = vmalloc_user(octets);
	if (!mapping->memory ||
	    rdma_user_mmap_entry_insert_range(&context->base, &mapping->base, octets, FIRST_PAGE,
					      U32_MAX)) {
		vfree(mapping->memory);
		kfree(mapping);
		return NULL;
	}
	*key = rdma_user_mmap_get_offset(&mapping->base);
	*entry = &mapping->base;
	return mapping->memory;
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
	return context ? alloc_shared(context, octets, mapping, key) : kvzalloc(octets, GFP_KERNEL);
}

void rnic_queue_memory_free(void *memory, struct rdma_user_mmap_entry *mapping)
{
	if (mapping)
		rdma_user_mmap_entry_remove(mapping);
	else
		kvfree(memory);
}

int rnic_mmap(struct ib_ucontext *context, struct vm_area_struct *area)
{
	struct rdma_user_mmap_entry *entry;
	int result;

	if (PAGE_ALIGN(area->vm_end - area->vm_start) != area->vm_end - area->vm_start)
		return -EINVAL;
	/* This call checks the offset and the length, too. */
	entry = rdma_user_mmap_entry_get(context, area);
	if (!entry)
		return -EINVAL;
	result = remap_vmalloc_range(area, container_of(entry, struct mapping, base)->memory, 0);
	rdma_user_mmap_entry_put(entry);
	return result;
}

void rnic_mmap_free(struct rdma_user_mmap_entry *entry)
{
	struct mapping *mapping = container_of(entry, struct mapping, base);

	vfree(mapping->memory);
	kfree(mapping);
}
