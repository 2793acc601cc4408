// SPDX-License-Identifier: MIT OR Apache-2.0
/* The rings that are shared with programs: memory of vmalloc_user(), which a program maps by a key that it was told. */
#include <linux/slab.h>
#include <linux/vmalloc.h>

#include "rnic.h"

struct mapping {
	struct rdma_user_mmap_entry base;
	void *at;
};

/* Makes memory available to a program under a key. Returns NULL if there is no memory or no key left. */
struct rdma_user_mmap_entry *rnic_map(struct rnic_ucontext *context, void *at, size_t octets,
				      u64 *key)
{
	struct mapping *mapping = kzalloc(sizeof(*mapping), GFP_KERNEL);

	*key = SIW_INVAL_UOBJ_KEY;
	if (!mapping)
		return NULL;
	mapping->at = at;
	if (rdma_user_mmap_entry_insert(&context->base, &mapping->base, octets)) {
		kfree(mapping);
		return NULL;
	}
	*key = rdma_user_mmap_get_offset(&mapping->base);
	return &mapping->base;
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
	kfree(container_of(entry, struct mapping, base));
}
