// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * Work areas: the plan and the staging that a queue pair needs to send and to receive, half a
 * megabyte. They are empty between messages, so the queue pairs of a device share a few. In
 * softirq, a queue pair that finds none free leaves the work to its work item, which allocates
 * another one if necessary. A queue pair whose peer does not read keeps its area; the others must
 * still be able to send.
 */
#include <linux/cpumask.h>
#include <linux/minmax.h>
#include <linux/sched/mm.h>

#include "rnic.h"

/* Returns an area to the pool of the device. Returns false if the pool is full. */
static bool put(struct rnic_device *device, struct rk_area *area)
{
	bool room;

	spin_lock_bh(&device->area_lock);
	room = device->areas_free < RNIC_AREAS;
	if (room)
		device->areas[device->areas_free++] = area;
	spin_unlock_bh(&device->area_lock);
	return room;
}

/*
 * Process context. Reclaim must not wait for storage here: the storage may be waiting for this
 * area.
 */
static struct rk_area *make(struct rnic_device *device)
{
	unsigned int flags = memalloc_noio_save();
	struct rk_area *area = rk_area_new();

	memalloc_noio_restore(flags);
	if (area)
		atomic_inc(&device->areas_made);
	return area;
}

static void put_or_free(struct rnic_device *device, struct rk_area *area)
{
	if (put(device, area))
		return;
	rk_area_free(area);
	atomic_dec(&device->areas_made);
}

/*
 * Allocates an area for a new queue pair, unless there are two for each processor: both ends of a
 * connection may be active on one. May sleep.
 */
int rnic_area_prepare(struct rnic_device *device)
{
	unsigned int enough = min(2 * num_online_cpus(), (unsigned int)RNIC_AREAS);
	struct rk_area *area;

	if (atomic_read(&device->areas_made) >= enough)
		return 0;
	area = make(device);
	if (!area)
		return -ENOMEM;
	put_or_free(device, area);
	return 0;
}

/*
 * Lends an area to a queue pair that has none. Returns false if none is free. Called with the lock.
 */
bool rnic_area_take(struct rnic_qp *qp)
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
 * Lends an area, and allocates one if none is free. Returns false if there is no memory. May sleep;
 * called without the lock.
 */
bool rnic_area_bring(struct rnic_qp *qp)
{
	struct rnic_device *device = to_device(qp->base.device);
	struct rk_area *area;
	bool lent;

	spin_lock_bh(&qp->lock);
	lent = rnic_area_take(qp);
	spin_unlock_bh(&qp->lock);
	if (lent)
		return true;
	area = make(device);
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
 * Returns the area to the pool unless it contains data. If the pool is full, the queue pair keeps
 * it. Called with the lock.
 */
void rnic_area_give(struct rnic_qp *qp)
{
	struct rk_area *area = rk_area_take_back(qp->engine);

	if (area && !put(to_device(qp->base.device), area))
		rk_area_lend(qp->engine, area);
}

void rnic_area_end(struct rnic_qp *qp)
{
	struct rk_area *area = rk_area_take_back(qp->engine);

	if (area)
		put_or_free(to_device(qp->base.device), area);
}

/* Frees the pool of a device that has no queue pairs any more. */
void rnic_areas_free(struct rnic_device *device)
{
	while (device->areas_free)
		rk_area_free(device->areas[--device->areas_free]);
}
