// SPDX-License-Identifier: MIT OR Apache-2.0
/* The rings that are shared with programs: memory of vmalloc_user(), which a program maps by a key that it was told. */
#include <linux/slab.h>
#include <linux/vmalloc.h>

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
void *rnic_share(struct rnic_ucontext *context, size_t octets, struct rdma_user_mmap_entry **entry,
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
