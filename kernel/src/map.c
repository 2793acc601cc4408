// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * Memory of queues. A ring that is shared with a program consists of single pages, which the
 * program maps by the ring's key. The pages are charged to the program's memory cgroup, and count
 * against its limit of locked memory, as the rings of other RNICs do. Rings of kernel clients are
 * not shared.
 */
#include <linux/capability.h>
#include <linux/mm.h>
#include <linux/sched/mm.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>
#include <linux/vmalloc.h>
#include <rdma/uverbs_ioctl.h>

#include "rnic.h"

/* For rdma-core, SIW_INVAL_UOBJ_KEY means "no key". Valid keys begin on the next page. */
#define FIRST_PAGE (SIW_INVAL_UOBJ_KEY / PAGE_SIZE + 1)

struct mapping {
	struct rdma_user_mmap_entry base;
	void *memory;
	/* The process whose pinned memory includes the pages. */
	struct mm_struct *owner;
	unsigned long pinned;
	/* Number of pages that were allocated. */
	unsigned long count;
	struct page *pages[];
};

/* Counts the pages as pinned memory of the calling process, unless that exceeds its limit. */
static bool count_pages(struct mapping *mapping, unsigned long count)
{
	unsigned long limit = rlimit(RLIMIT_MEMLOCK) >> PAGE_SHIFT;

	if (atomic64_add_return(count, &current->mm->pinned_vm) > limit && !capable(CAP_IPC_LOCK)) {
		atomic64_sub(count, &current->mm->pinned_vm);
		return false;
	}
	mapping->owner = current->mm;
	mmgrab(mapping->owner);
	return true;
}

static void free_mapping(struct mapping *mapping)
{
	unsigned long i;

	vunmap(mapping->memory);
	for (i = 0; i < mapping->count; i++)
		__free_page(mapping->pages[i]);
	if (mapping->owner) {
		atomic64_sub(mapping->pinned, &mapping->owner->pinned_vm);
		mmdrop(mapping->owner);
	}
	kvfree(mapping);
}

/* Allocates zeroed pages, and maps them into the kernel. Returns NULL on failure. */
static struct mapping *new_mapping(unsigned long count)
{
	struct mapping *mapping = kvzalloc(struct_size(mapping, pages, count), RNIC_GFP);

	if (!mapping)
		return NULL;
	mapping->pinned = count;
	if (!count_pages(mapping, count))
		goto free;
	for (; mapping->count < count; mapping->count++) {
		struct page *page = alloc_page(RNIC_GFP | __GFP_ZERO);

		if (!page)
			goto free;
		mapping->pages[mapping->count] = page;
	}
	mapping->memory = vmap(mapping->pages, count, VM_MAP, PAGE_KERNEL);
	if (mapping->memory)
		return mapping;
free:
	free_mapping(mapping);
	return NULL;
}

/*
 * Allocates zeroed memory that a program can map by `key`. After the entry is removed, the memory
 * is freed as soon as no mmap call uses it, because such a call holds a reference.
 */
static void *alloc_shared(struct rnic_ucontext *context, size_t octets,
			  struct rdma_user_mmap_entry **entry, u64 *key)
{
	struct mapping *mapping = new_mapping(PAGE_ALIGN(octets) >> PAGE_SHIFT);

	*key = SIW_INVAL_UOBJ_KEY;
	if (!mapping)
		return NULL;
	if (rdma_user_mmap_entry_insert_range(&context->base, &mapping->base, octets, FIRST_PAGE,
					      U32_MAX)) {
		free_mapping(mapping);
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
	return context ? alloc_shared(context, octets, mapping, key) : kvzalloc(octets, RNIC_GFP);
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
	struct mapping *mapping;
	int result;

	if (PAGE_ALIGN(area->vm_end - area->vm_start) != area->vm_end - area->vm_start)
		return -EINVAL;
	/* This call checks the offset and the length, too. */
	entry = rdma_user_mmap_entry_get(context, area);
	if (!entry)
		return -EINVAL;
	mapping = container_of(entry, struct mapping, base);
	/* The program cannot enlarge the mapping by mremap(). */
	vm_flags_set(area, VM_DONTEXPAND | VM_DONTDUMP);
	result = vm_map_pages_zero(area, mapping->pages, mapping->count);
	rdma_user_mmap_entry_put(entry);
	return result;
}

void rnic_mmap_free(struct rdma_user_mmap_entry *entry)
{
	free_mapping(container_of(entry, struct mapping, base));
}
