// SPDX-License-Identifier: MIT OR Apache-2.0
/* Memory of programs: pinned pages, whose addresses the engine gets as a list. */
#include <linux/delay.h>
#include <linux/mm.h>
#include <linux/random.h>
#include <linux/slab.h>
#include <rdma/ib_umem.h>
#include <rdma/uverbs_ioctl.h>

#include "rnic.h"

/* Rights that the interface can carry. */
#define RIGHTS (IB_ACCESS_LOCAL_WRITE | IB_ACCESS_REMOTE_WRITE | IB_ACCESS_REMOTE_READ)
/* How long a deregistration waits for those who are in the middle of the memory, in milliseconds. */
#define PATIENCE_MS 1000

static_assert((int)RK_LOCAL_WRITE == IB_ACCESS_LOCAL_WRITE &&
	      (int)RK_REMOTE_WRITE == IB_ACCESS_REMOTE_WRITE &&
	      (int)RK_REMOTE_READ == IB_ACCESS_REMOTE_READ);

/* Gives the table slots for one more entry. They are allocated without the lock. */
static int make_room(struct rnic_device *device)
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

/* Lists the addresses of the pages. All memory of this machine is mapped. */
static int list_pages(struct rnic_mr *mr)
{
	struct sg_page_iter iter;
	size_t count = ib_umem_num_pages(mr->umem), i = 0;

	mr->pages = kvmalloc_array(count, sizeof(*mr->pages), GFP_KERNEL);
	if (!mr->pages)
		return -ENOMEM;
	for_each_sgtable_page(&mr->umem->sgt_append.sgt, &iter, 0) {
		if (WARN_ON_ONCE(i == count))
			return -EINVAL;
		mr->pages[i++] = (uintptr_t)page_address(sg_page_iter_page(&iter));
	}
	return i == count ? 0 : -EINVAL;
}

static void free_mr(struct rnic_mr *mr)
{
	ib_umem_release(mr->umem);
	kvfree(mr->pages);
	kfree(mr);
}

static int add_to_table(struct rnic_mr *mr, struct rnic_pd *pd, u64 len, u64 iova, u32 rights,
			u8 key)
{
	struct rnic_device *device = to_device(pd->base.device);
	/* The number is hard to guess; the key is the program's. */
	u32 random = (get_random_u32() & ~0xffu) | key;
	int result;

	mutex_lock(&device->registering);
	result = make_room(device);
	if (result)
		goto unlock;
	write_lock_bh(&device->table_lock);
	mr->base.lkey = rk_register_pages(device->engine, mr->pages, ib_umem_offset(mr->umem), len,
					  iova, pd->number, rights, random);
	write_unlock_bh(&device->table_lock);
	mr->base.rkey = mr->base.lkey;
	if (!mr->base.lkey)
		result = -EINVAL;
unlock:
	mutex_unlock(&device->registering);
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
		if (result != -EBUSY || waited == PATIENCE_MS)
			return result;
		usleep_range(500, 1000);
	}
}

struct ib_mr *rnic_reg_user_mr(struct ib_pd *pd, u64 start, u64 len, u64 iova, int rights,
			       struct ib_udata *udata)
{
	struct siw_ureq_reg_mr request;
	struct siw_uresp_reg_mr answer = {};
	struct rnic_mr *mr;
	int result;

	if (!len || !udata || udata->inlen < sizeof(request) || udata->outlen < sizeof(answer))
		return ERR_PTR(-EINVAL);
	/* Programs ask for atomic operations without having any. No peer gets that right. */
	if (rights & ~(RIGHTS | IB_ACCESS_REMOTE_ATOMIC | IB_ACCESS_OPTIONAL))
		return ERR_PTR(-EOPNOTSUPP);
	result = ib_copy_from_udata(&request, udata, sizeof(request));
	if (result)
		return ERR_PTR(result);
	mr = kzalloc(sizeof(*mr), GFP_KERNEL);
	if (!mr)
		return ERR_PTR(-ENOMEM);
	mr->base.device = pd->device;
	/* Counts against the limit of locked memory. */
	mr->umem = ib_umem_get(pd->device, start, len, rights);
	if (IS_ERR(mr->umem)) {
		result = PTR_ERR(mr->umem);
		kfree(mr);
		return ERR_PTR(result);
	}
	result = list_pages(mr);
	if (result)
		goto free;
	result = add_to_table(mr, to_pd(pd), len, iova, rights & RIGHTS, request.stag_key);
	if (result)
		goto free;
	answer.stag = mr->base.lkey;
	result = ib_copy_to_udata(udata, &answer, sizeof(answer));
	if (!result)
		return &mr->base;
	remove_from_table(mr);
free:
	free_mr(mr);
	return ERR_PTR(result);
}

/* The pages may go only when no peer and no request of this machine can touch them any more. */
int rnic_dereg_mr(struct ib_mr *base, struct ib_udata *udata)
{
	struct rnic_mr *mr = container_of(base, struct rnic_mr, base);
	int result = remove_from_table(mr);

	if (result)
		return result;
	free_mr(mr);
	return 0;
}

/* For clients in the kernel, which have no queues here yet. Without this function rdma_cm would not take the device. */
struct ib_mr *rnic_get_dma_mr(struct ib_pd *pd, int rights)
{
	return ERR_PTR(-EOPNOTSUPP);
}
