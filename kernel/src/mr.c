// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * Memory regions of three kinds: pinned pages of a program, passed to the engine as a list of
 * addresses; pages that a kernel client lists for each registration by work request; and the whole
 * kernel address space, for kernel clients only.
 */
#include <linux/delay.h>
#include <linux/mm.h>
#include <linux/random.h>
#include <linux/slab.h>
#include <rdma/ib_umem.h>
#include <rdma/uverbs_ioctl.h>

#include "rnic.h"

/* How long a deregistration waits for requests that are accessing the memory, in milliseconds. */
#define DEREG_TIMEOUT_MS 1000

static_assert((int)RK_LOCAL_WRITE == IB_ACCESS_LOCAL_WRITE &&
	      (int)RK_REMOTE_WRITE == IB_ACCESS_REMOTE_WRITE &&
	      (int)RK_REMOTE_READ == IB_ACCESS_REMOTE_READ);

/* Adds a slot to the table if all slots are used. Slots are allocated without the lock. */
static int add_slots(struct rnic_device *device)
{
	struct rk_slots *slots = rk_slots_new();
	bool lacking;
	int result;

	if (!slots)
		return -ENOMEM;
	read_lock_bh(&device->table_lock);
	lacking = rk_slots_lacking(device->engine, slots);
	read_unlock_bh(&device->table_lock);
	result = rk_slots_make(slots);
	if (!result && lacking) {
		write_lock_bh(&device->table_lock);
		rk_slots_attach(device->engine, slots);
		write_unlock_bh(&device->table_lock);
	}
	rk_slots_free(slots);
	return result;
}

/* Lists the addresses of the pages. The kernel has a direct mapping of all memory. */
static int list_pages(struct rnic_mr *mr)
{
	struct sg_page_iter iter;
	size_t count = ib_umem_num_pages(mr->umem), i = 0;

	mr->pages = kvmalloc_array(count, sizeof(*mr->pages), RNIC_GFP);
	if (!mr->pages)
		return -ENOMEM;
	for_each_sgtable_page(&mr->umem->sgt_append.sgt, &iter, 0) {
		if (WARN_ON_ONCE(i == count))
			return -EINVAL;
		mr->pages[i++] = (uintptr_t)page_address(sg_page_iter_page(&iter));
	}
	return i == count ? 0 : -EINVAL;
}

static struct rnic_mr *new_mr(struct ib_pd *pd)
{
	struct rnic_mr *mr = kzalloc(sizeof(*mr), RNIC_GFP);

	if (mr)
		mr->base.device = pd->device;
	return mr;
}

static void free_mr(struct rnic_mr *mr)
{
	ib_umem_release(mr->umem);
	kvfree(mr->pages);
	kfree(mr);
}

/* Adds the region to the engine's table. Returns its STag, or 0. Called with the table's lock. */
static u32 register_region(struct rk_device *engine, struct rnic_mr *mr, u32 pd, u32 rights,
			   u32 random)
{
	if (mr->umem)
		return rk_register_pages(engine, mr->pages, ib_umem_offset(mr->umem),
					 mr->base.length, mr->base.iova, pd, rights, random);
	if (mr->pages)
		return rk_allocate_fast(engine, mr->pages, mr->max_pages, pd, random);
	return rk_register(engine, 0, U64_MAX, pd, rights, random);
}

static int add_to_table(struct rnic_mr *mr, struct ib_pd *pd, u32 rights, u8 key)
{
	struct rnic_device *device = to_device(pd->device);
	/* The STag's index is random, so that it is hard to guess. The owner chooses the key. */
	u32 random = (get_random_u32() & ~0xffu) | key;
	int result;

	mutex_lock(&device->register_lock);
	result = add_slots(device);
	if (result)
		goto unlock;
	write_lock_bh(&device->table_lock);
	mr->base.lkey = register_region(device->engine, mr, to_pd(pd)->number, rights, random);
	write_unlock_bh(&device->table_lock);
	mr->base.rkey = mr->base.lkey;
	if (!mr->base.lkey)
		result = -EINVAL;
unlock:
	mutex_unlock(&device->register_lock);
	return result;
}

static int remove_from_table(struct rnic_mr *mr)
{
	struct rnic_device *device = to_device(mr->base.device);
	unsigned int waited;
	int result;

	for (waited = 0;; waited++) {
		write_lock_bh(&device->table_lock);
		result = rk_deregister(device->engine, mr->base.lkey);
		write_unlock_bh(&device->table_lock);
		if (result != -EBUSY || waited == DEREG_TIMEOUT_MS)
			return result;
		usleep_range(500, 1000);
	}
}

struct ib_mr *rnic_reg_user_mr(struct ib_pd *pd, u64 start, u64 len, u64 iova, int rights,
			       struct ib_udata *udata)
{
	struct siw_ureq_reg_mr request;
	struct siw_uresp_reg_mr response = {};
	struct rnic_mr *mr;
	int result;

	if (!len || !udata || udata->inlen < sizeof(request) || udata->outlen < sizeof(response))
		return ERR_PTR(-EINVAL);
	/* Programs request atomic access although they do not use it. It is not granted. */
	if (rights & ~(RNIC_RIGHTS | IB_ACCESS_REMOTE_ATOMIC | IB_ACCESS_OPTIONAL))
		return ERR_PTR(-EOPNOTSUPP);
	result = ib_copy_from_udata(&request, udata, sizeof(request));
	if (result)
		return ERR_PTR(result);
	mr = new_mr(pd);
	if (!mr)
		return ERR_PTR(-ENOMEM);
	/* Pins the pages. They count against RLIMIT_MEMLOCK. */
	mr->umem = ib_umem_get_va(pd->device, start, len, rights);
	if (IS_ERR(mr->umem)) {
		result = PTR_ERR(mr->umem);
		kfree(mr);
		return ERR_PTR(result);
	}
	result = list_pages(mr);
	if (result)
		goto free;
	mr->base.length = len;
	mr->base.iova = iova;
	result = add_to_table(mr, pd, rights & RNIC_RIGHTS, request.stag_key);
	if (result)
		goto free;
	response.stag = mr->base.lkey;
	result = ib_copy_to_udata(udata, &response, sizeof(response));
	if (!result)
		return &mr->base;
	remove_from_table(mr);
free:
	free_mr(mr);
	return ERR_PTR(result);
}

/* Releases the pages only when neither a peer nor a local request can access them any more. */
int rnic_dereg_mr(struct ib_mr *base, struct ib_udata *udata)
{
	struct rnic_mr *mr = to_mr(base);
	int result = remove_from_table(mr);

	if (result)
		return result;
	free_mr(mr);
	return 0;
}

/* Adds the region of a kernel client to the table, or frees it on failure. */
static struct ib_mr *add_or_free(struct rnic_mr *mr, struct ib_pd *pd, u32 rights)
{
	int result = add_to_table(mr, pd, rights, 0);

	if (!result)
		return &mr->base;
	free_mr(mr);
	return ERR_PTR(result);
}

/*
 * Creates a region of the whole kernel address space. ib_core requests one for each protection
 * domain of a kernel client, without remote access unless the client sets IB_PD_UNSAFE_GLOBAL_RKEY.
 * Programs cannot create such a region.
 */
struct ib_mr *rnic_get_dma_mr(struct ib_pd *pd, int rights)
{
	struct rnic_mr *mr;

	if (pd->uobject || rights & ~RNIC_RIGHTS)
		return ERR_PTR(-EOPNOTSUPP);
	mr = new_mr(pd);
	if (!mr)
		return ERR_PTR(-ENOMEM);
	return add_or_free(mr, pd, rights);
}

/* Creates a region for fast registration: work requests set its pages and access rights. */
struct ib_mr *rnic_alloc_mr(struct ib_pd *pd, enum ib_mr_type type, u32 max_pages)
{
	struct rnic_mr *mr;

	if (type != IB_MR_TYPE_MEM_REG)
		return ERR_PTR(-EOPNOTSUPP);
	if (!max_pages || max_pages > RNIC_MAX_FAST_PAGES)
		return ERR_PTR(-EINVAL);
	mr = new_mr(pd);
	if (!mr)
		return ERR_PTR(-ENOMEM);
	mr->max_pages = max_pages;
	mr->pages = kvcalloc(max_pages, sizeof(*mr->pages), RNIC_GFP);
	if (mr->pages)
		return add_or_free(mr, pd, 0);
	free_mr(mr);
	return ERR_PTR(-ENOMEM);
}

static int list_page(struct ib_mr *base, u64 address)
{
	struct rnic_mr *mr = to_mr(base);

	if (mr->num_pages == mr->max_pages)
		return -ENOMEM;
	mr->pages[mr->num_pages++] = address;
	return 0;
}

/*
 * Lists the pages of the next registration. The client guarantees that the previous registration
 * has ended. Any context.
 */
int rnic_map_mr_sg(struct ib_mr *base, struct scatterlist *list, int count, unsigned int *offset)
{
	to_mr(base)->num_pages = 0;
	return ib_sg_to_pages(base, list, count, offset, list_page);
}
