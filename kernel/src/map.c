// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * Memory of queues. Rings that are shared with programs are memory of vmalloc_user(), which a program maps by a key that it was told. Clients in
 * the kernel share nothing.
 */
#include <linux/mm.h>
#include <linux/slab.h>
#include <linux/vmalloc.h>
#include <rdma/uverbs_ioctl.h>

#include "rnic.h"

/* The library takes the key of one page for the sign that there is no key. Mappings begin behind it. */
#define FIRST_PAGE (SIW_INVAL_UOBJ_KEY / PAGE_SIZE + 1)

struct mapping {
	struct rdma_user_mmap_entry base;
	void *at;
};

/*
 * Makes zeroed memory that a program can map with the key. Removing the entry frees it, as soon as no call maps it at that moment: such a call
 * has a reference.
 */
static void *share(struct rnic_ucontext *context, size_t octets, struct rdma_user_mmap_entry **entry,
		   u64 *key)
{
	struct mapping *mapping = kzalloc(sizeof(*mapping), GFP_KERNEL);

	*key = SIW_INVAL_UOBJ_KEY;
	if (!mapping)
		return NULL;
	mapping->at = vmalloc_user(octets);
	if (!mapping->at || rdma_user_mmap_entry_insert_range(&context->base, &mapping->base, octets,
							      FIRST_PAGE, U32_MAX)) {
		vfree(mapping->at);
		kfree(mapping);
		return NULL;
	}
	*key = rdma_user_mmap_get_offset(&mapping->base);
	*entry = &mapping->base;
	return mapping->at;
}

/* The context of a program that calls, or NULL for a client in the kernel. */
struct rnic_ucontext *rnic_context_of(struct ib_udata *udata)
{
	return udata ? rdma_udata_to_drv_context(udata, struct rnic_ucontext, base) : NULL;
}

/* Makes zeroed memory for a queue, shared with the program if there is one. Without one there is no mapping either. */
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
