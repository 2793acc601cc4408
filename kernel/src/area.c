// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * Work areas: the buffers that a queue pair needs to send and to receive, half a megabyte. An area
 * contains data only while a message is in transit, so the queue pairs of a device share a pool of
 * areas.
 *
 * A peer may send part of an FPDU and then nothing more. Its bytes are set aside in memory of their
 * size if few areas are left, so that silent peers do not keep areas.
 *
 * If the pool is empty in softirq, the queue pair's work item continues, and allocates an area if
 * necessary. A queue pair whose peer does not read keeps its area, but all other queue pairs must
 * still be able to send.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/cpumask.h>
#include <linux/log2.h>
#include <linux/minmax.h>
#include <linux/sched/mm.h>
#include <linux/sizes.h>
#include <linux/slab.h>

#include "rnic.h"

/* Maximum number of bytes of partial FPDUs that a device sets aside. */
#define MAX_PARTIAL_OCTETS (2u << 20)
/* If there is no more room for partial FPDUs, a peer that was silent for this long is dropped. */
#define MAX_SILENCE (2 * HZ)

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

/* Two for each processor: both ends of a connection may be active on one processor. */
static unsigned int pool_target(void)
{
	return min(2 * num_online_cpus(), (unsigned int)RNIC_AREAS);
}

/* Adds an area to the pool for a new queue pair, until there are enough. May sleep. */
int rnic_area_reserve(struct rnic_device *device)
{
	struct rk_area *area;

	if (atomic_read(&device->areas_total) >= pool_target())
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

/* ---- partial FPDUs ---- */

/*
 * Drops the connection of the peer that has been silent for the longest time, unless that time is
 * short: then the peer is probably sending. Called with `area_lock`.
 */
static void evict_silent(struct rnic_device *device)
{
	struct rnic_qp *oldest = list_first_entry_or_null(&device->partials, struct rnic_qp,
							  partial_entry);

	if (!oldest || time_before(jiffies, oldest->partial_since + MAX_SILENCE))
		return;
	list_del_init(&oldest->partial_entry);
	WRITE_ONCE(oldest->evicted, true);
	rnic_stream_kick(oldest);
	pr_notice_ratelimited("%s: queue pair %u is reset: its peer has sent part of an FPDU\n",
			      dev_name(&device->base.dev), oldest->base.qp_num);
}

/* Returns how much memory the bytes take at most. */
static size_t partial_size(size_t octets)
{
	return roundup_pow_of_two(octets);
}

/* Counts the bytes, unless that exceeds the limit. */
static bool admit_partial(struct rnic_device *device, struct rnic_qp *qp, size_t octets)
{
	bool admitted;

	spin_lock_bh(&device->area_lock);
	admitted = device->partial_octets + partial_size(octets) <= MAX_PARTIAL_OCTETS;
	if (admitted) {
		device->partial_octets += partial_size(octets);
		qp->partial_since = jiffies;
		list_add_tail(&qp->partial_entry, &device->partials);
	} else {
		evict_silent(device);
	}
	spin_unlock_bh(&device->area_lock);
	return admitted;
}

/* Discards the partial FPDU that is set aside, if there is one. Called with the lock. */
void rnic_partial_drop(struct rnic_qp *qp)
{
	struct rnic_device *device = to_device(qp->base.device);

	if (!qp->partial_len)
		return;
	spin_lock_bh(&device->area_lock);
	list_del_init(&qp->partial_entry);
	device->partial_octets -= partial_size(qp->partial_len);
	spin_unlock_bh(&device->area_lock);
	kfree(qp->partial);
	qp->partial = NULL;
	qp->partial_len = 0;
}

/*
 * Sets the partial FPDU in the queue pair's area aside, unless enough areas are left for the
 * others. If there is no memory, the queue pair keeps its area. Called with the lock.
 */
static void set_partial_aside(struct rnic_qp *qp)
{
	struct rnic_device *device = to_device(qp->base.device);
	size_t octets = rk_area_partial(qp->engine);

	if (!octets || READ_ONCE(device->areas_free) >= pool_target() / 2)
		return;
	qp->partial = kmalloc(octets, GFP_ATOMIC | __GFP_NOWARN);
	if (!qp->partial)
		return;
	if (admit_partial(device, qp, octets)) {
		qp->partial_len = octets;
		rk_area_save(qp->engine, qp->partial);
	} else {
		kfree(qp->partial);
		qp->partial = NULL;
		/* Try again when a peer can be evicted. */
		timer_reduce(&qp->timer, jiffies + MAX_SILENCE);
	}
}

/*
 * If there is no more room for partial FPDUs, leaves the one at the end of a packet in the socket.
 * Returns how many bytes of the packet, of which `consumed` were passed to the engine, to leave.
 * Called with the lock.
 */
size_t rnic_partial_refuse(struct rnic_qp *qp, size_t consumed)
{
	struct rnic_device *device = to_device(qp->base.device);
	size_t octets;

	/* Without the lock: a few more bytes do not matter. */
	if (likely(READ_ONCE(device->partial_octets) < MAX_PARTIAL_OCTETS - SZ_64K))
		return 0;
	octets = rk_area_partial(qp->engine);
	if (!octets || octets > consumed)
		return 0;
	spin_lock_bh(&device->area_lock);
	evict_silent(device);
	spin_unlock_bh(&device->area_lock);
	rk_area_save(qp->engine, NULL);
	timer_reduce(&qp->timer, jiffies + MAX_SILENCE / 8);
	return octets;
}

/*
 * Like rnic_area_borrow(), and moves a partial FPDU that was set aside into the area. Called with
 * the lock.
 */
bool rnic_area_borrow_to_receive(struct rnic_qp *qp)
{
	if (!rnic_area_borrow(qp))
		return false;
	if (qp->partial_len) {
		WARN_ON_ONCE(!rk_area_restore(qp->engine, qp->partial, qp->partial_len));
		rnic_partial_drop(qp);
	}
	return true;
}

/*
 * Returns the queue pair's area to the pool unless it contains data. If the pool is full, the queue
 * pair keeps its area. Called with the queue pair's lock.
 */
void rnic_area_return(struct rnic_qp *qp)
{
	struct rk_area *area = rk_area_take_back(qp->engine);

	if (!area) {
		set_partial_aside(qp);
		area = rk_area_take_back(qp->engine);
	}
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
