// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * Work areas: the buffers that a queue pair needs to send and to receive, half a megabyte. An area
 * contains data only while a message is in transit, so the queue pairs of a device share a pool of
 * areas.
 *
 * If the pool is empty in softirq, the queue pair's work item continues, and allocates an area if
 * necessary. A queue pair whose peer does not read keeps its area, but all other queue pairs must
 * still be able to send.
 */
#include <linux/cpumask.h>
#include <linux/minmax.h>
#include <linux/sched/mm.h>

#include "rnic.h"

/* Returns an area to the pool of the device. Returns false if the pool is full. */
static bool put_in_pool(struct rnic_device *device, struct rk_area *area)
{
	bool has_room;

	spin_lock_bh(&device->area_lock);
	has_room = device->areas_free < RNIC_AREAS;
	if (has_room)
		device->areas[device->areas_free++] = area;
	spin_unlock_bh(&device->area_lock);
	return has_room;
}

/*
 * Process context. Memory reclaim must not wait for I/O here, because the I/O may be waiting for
 * this area.
 */
static struct rk_area *create_area(struct rnic_device *device)
{
	unsigned int flags = memalloc_noio_save();
	struct rk_area *area = rk_area_new();

	memalloc_noio_restore(flags);
	if (area)
		atomic_inc(&device->areas_total);
	return area;
}

static void put_or_free(struct rnic_device *device, struct rk_area *area)
{
	if (put_in_pool(device, area))
		return;
	rk_area_free(area);
	atomic_dec(&device->areas_total);
}

/*
 * Adds an area to the pool for a new queue pair, until there are two for each processor: both ends
 * of a connection may be active on one processor. May sleep.
 */
int rnic_area_reserve(struct rnic_device *device)
{
	unsigned int target = min(2 * num_online_cpus(), (unsigned int)RNIC_AREAS);
	struct rk_area *area;

	if (atomic_read(&device->areas_total) >= target)
		return 0;
	area = create_area(device);
	if (!area)
		return -ENOMEM;
	put_or_free(device, area);
	return 0;
}

/*
 * Lends an area to the queue pair if it has none. Returns false if the pool is empty. Called with
 * the queue pair's lock.
 */
bool rnic_area_borrow(struct rnic_qp *qp)
{
	struct rnic_device *device = to_device(qp->base.device);
	struct rk_area *area = NULL;

	if (rk_area_is_lent(qp->engine))
		return true;
	spin_lock_bh(&device->area_lock);
	if (device->areas_free)
		area = device->areas[--device->areas_free];
	spin_unlock_bh(&device->area_lock);
	if (area)
		rk_area_lend(qp->engine, area);
	return area;
}

/*
 * Like rnic_area_borrow(), but allocates an area if the pool is empty. Returns false if there is no
 * memory. May sleep; called without the queue pair's lock.
 */
bool rnic_area_borrow_or_make(struct rnic_qp *qp)
{
	struct rnic_device *device = to_device(qp->base.device);
	struct rk_area *area;
	bool lent;

	spin_lock_bh(&qp->lock);
	lent = rnic_area_borrow(qp);
	spin_unlock_bh(&qp->lock);
	if (lent)
		return true;
	area = create_area(device);
	if (!area)
		return false;
	spin_lock_bh(&qp->lock);
	lent = rk_area_is_lent(qp->engine);
	if (!lent)
		rk_area_lend(qp->engine, area);
	spin_unlock_bh(&qp->lock);
	if (lent)
		put_or_free(device, area);
	return true;
}

/*
 * Returns the queue pair's area to the pool unless it contains data. If the pool is full, the queue
 * pair keeps its area. Called with the queue pair's lock.
 */
void rnic_area_return(struct rnic_qp *qp)
{
	struct rk_area *area = rk_area_take_back(qp->engine);

	if (area && !put_in_pool(to_device(qp->base.device), area))
		rk_area_lend(qp->engine, area);
}

void rnic_area_release(struct rnic_qp *qp)
{
	struct rk_area *area = rk_area_take_back(qp->engine);

	if (area)
		put_or_free(to_device(qp->base.device), area);
}

/* Frees the pool of a device without queue pairs. */
void rnic_areas_free(struct rnic_device *device)
{
	while (device->areas_free)
		rk_area_free(device->areas[--device->areas_free]);
}
