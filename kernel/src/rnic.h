/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* The objects of the RDMA device, and the functions that the module's files share. */
#ifndef IWARP_RNIC_H
#define IWARP_RNIC_H

#include <linux/etherdevice.h>
#include <linux/interrupt.h>
#include <linux/kref.h>
#include <linux/mutex.h>
#include <linux/net.h>
#include <linux/netdevice.h>
#include <linux/smp.h>
#include <linux/spinlock.h>
#include <linux/timer.h>
#include <linux/uio.h>
#include <linux/workqueue.h>
#include <linux/xarray.h>
#include <rdma/ib_verbs.h>
#include <uapi/rdma/siw-abi.h>

#include "compat.h"
#include "runtime.h"

#define RNIC_PORT 1
/*
 * For objects of programs: charged to the memory cgroup of the caller. If its limit is reached, the
 * allocation fails, instead of having the kernel kill a process of the cgroup.
 */
#define RNIC_GFP (GFP_KERNEL_ACCOUNT | __GFP_RETRY_MAYFAIL | __GFP_NOWARN)
#define RNIC_MAX_CQE (1 << 20)
#define RNIC_MAX_WR 32768
#define RNIC_MAX_READS 128
/* Maximum number of ring entries that are processed before the lock is released. */
#define RNIC_SENDS_AT_ONCE 64
/* Maximum number of work areas in the pool of a device: 8 MiB. */
#define RNIC_AREAS 16
/* Maximum number of pages of a region for fast registration: 4 MiB. */
#define RNIC_MAX_FAST_PAGES 1024
#define RNIC_RIGHTS (IB_ACCESS_LOCAL_WRITE | IB_ACCESS_REMOTE_WRITE | IB_ACCESS_REMOTE_READ)

struct iw_cm_conn_param;
struct iw_cm_id;

/*
 * Workqueues: for the work items of queue pairs, for combined sends, and, with one item at a time,
 * for connections before they are established.
 */
extern struct workqueue_struct *rnic_wq;
extern struct workqueue_struct *rnic_send_wq;
extern struct workqueue_struct *rnic_cm_wq;

/* Module parameters; they apply to new connections. */
extern unsigned int rnic_mpa_revision;
extern bool rnic_mpa_crc;
extern bool rnic_mpa_markers;
extern bool rnic_peer_to_peer;
/* Applies to new queue pairs. */
extern unsigned int rnic_rnr_wait_ms;

/* An RDMA device. It belongs to one network device, and never changes it. */
struct rnic_device {
	struct ib_device base;
	struct net_device *netdev;
	netdevice_tracker tracker;
	/* The network namespace, and the entry in the list of devices. See net.c. */
	struct net *net;
	struct list_head entry;
	/* The memory table. Queue pairs read it; registrations write it. */
	struct rk_device *engine;
	rwlock_t table_lock;
	/* The pool of work areas, and the number of all areas, including those lent. See area.c. */
	spinlock_t area_lock;
	struct rk_area *areas[RNIC_AREAS];
	unsigned int areas_free;
	atomic_t areas_total;
	/* Queue pairs whose partial FPDU is set aside, the longest silent first; and their bytes. */
	struct list_head partials;
	size_t partial_octets;
	/* Serializes registrations, so that each finds the slot that it has added. */
	struct mutex register_lock;
	struct xarray qps;
	u32 next_qp;
	/* Counters of destroyed queue pairs. Guarded by the lock of `qps`. */
	u64 retired_counters[RK_COUNTERS];
	/* The GID of the port: a hardware address followed by zeros. */
	u8 address[ETH_ALEN];
	/* The last reported state of the port. Only the notifier changes it, under the RTNL. */
	bool active;
};

struct rnic_pd {
	struct ib_pd base;
	/* The protection domain's number in the engine. */
	u32 number;
};

struct rnic_ucontext {
	struct ib_ucontext base;
};

struct rnic_cq {
	struct ib_cq base;
	/* Guards the following fields and the order of the entries. */
	spinlock_t lock;
	struct siw_cqe *ring;
	struct siw_cq_ctrl *control;
	/* Index of the next entry to write. */
	u32 write_index;
	/* Kernel clients: index of the next entry to poll. */
	u32 read_index;
	/*
	 * Since the last notification, entries were written, and at least one of them satisfies a
	 * request for solicited events.
	 */
	bool written;
	bool solicited;
	bool overflowed;
	bool overflow_reported;
	/* Kernel clients: messages polled since the last call of the handler. */
	u32 received;
	/*
	 * Kernel clients: for how many more calls of the handler the queue is regarded as busy
	 * (messages arrive faster than they are polled) and crowded (many arrive at a time).
	 */
	u32 busy;
	u32 crowded;
	u32 processor;
	/* Calls the handler on `processor`; and the number of such calls that have not ended. */
	call_single_data_t call;
	atomic_t pending_calls;
	/* NULL for a kernel client. */
	struct rdma_user_mmap_entry *mapping;
};

struct rnic_ring {
	void *entries;
	u32 count;
	/* Index of the next entry to take. */
	u32 next;
	/* Kernel clients: index of the next entry to fill, and its lock (interrupts off). */
	u32 fill_index;
	spinlock_t fill_lock;
	/* NULL for a kernel client. */
	struct rdma_user_mmap_entry *mapping;
};

struct rnic_srq {
	struct ib_srq base;
	u32 max_sge;
	/* Guards the following fields. */
	spinlock_t lock;
	struct rnic_ring ring;
	/* Notify once when fewer receives than this are posted; 0: never. */
	u32 limit;
	bool limit_reached;
};

/* Bits that select the sender for a queue pair; see send.c. */
enum rnic_tx {
	/* Requests were posted, and no sender has taken them yet. */
	RNIC_TX_DUE,
	/* A processor is sending. It checks RNIC_TX_DUE after it has cleared this bit. */
	RNIC_TX_SENDING,
	/*
	 * The network stack is receiving and holds the socket's lock. The receiver checks
	 * RNIC_TX_DUE after it has cleared this bit.
	 */
	RNIC_TX_RECEIVING,
};

/*
 * The driver's state of a connection. The engine keeps the rest: whether the stream is being ended
 * (rk_qp_is_ending), whether this side is shut down (rk_qp_is_shut_down), and whether the peer has
 * closed (rk_qp_peer_has_closed).
 *
 * | event                                    | NONE | UP       | ENDING   | GIVEN_UP |
 * | ---------------------------------------- | ---- | -------- | -------- | -------- |
 * | begin_stream() in cm.c: start-up is done | UP   | refused  | refused  | refused  |
 * | begin_ending(): the engine ends it       | -    | ENDING   | ENDING * | -        |
 * | rnic_give_up(): reset, or destroyed      | -    | GIVEN_UP | GIVEN_UP | -        |
 * | detach(): closed or reset                | -    | NONE     | NONE     | NONE     |
 *
 * A dash: the state does not change. *: the time limit starts again.
 */
enum rnic_stream_state {
	RNIC_STREAM_NONE,
	RNIC_STREAM_UP,
	/* The stream is being ended; see `deadline` of the queue pair. */
	RNIC_STREAM_ENDING,
	/* The next call of rnic_stream_turn() resets the stream. */
	RNIC_STREAM_GIVEN_UP,
};

struct rnic_qp {
	struct ib_qp base;
	struct ib_qp_cap cap;
	struct kref ref;
	struct completion released;

	/* Guards the engine's queue pair and the rings. */
	spinlock_t lock;
	struct rk_qp *engine;
	/* Without entries for a kernel client, whose sends are posted to the engine directly. */
	struct rnic_ring sq;
	struct rnic_ring rq;
	/* Sends that a kernel client has posted with interrupts off; see post.c. */
	struct llist_head irq_posts;
	/* The ring contains sends for which the engine had no room. */
	bool sends_pending;

	/* Guards the connection: held to attach or detach it, and by its users that may sleep. */
	struct mutex mutex;
	struct socket *socket;
	struct iw_cm_id *id;
	/*
	 * The struct sock of `socket`; changed under `lock`. Sending needs the socket's lock; see
	 * stream.c.
	 */
	struct sock *sk;
	unsigned long tx;
	struct tasklet_struct sender;
	struct work_struct send_work;
	struct work_struct work;
	/* Queues `work` at the time that rk_poll_at() returned. */
	struct timer_list timer;
	/* `stream_state`, `deadline` and `acknowledged` are guarded by `lock`. */
	enum rnic_stream_state stream_state;
	/*
	 * In RNIC_STREAM_ENDING: time limit in jiffies. Until this side is shut down, the peer must
	 * acknowledge more bytes before it; then, the peer must close its side before it.
	 */
	unsigned long deadline;
	/* The peer's acknowledgement (snd_una) when `deadline` was set. */
	u32 acknowledged;
	/*
	 * Part of an FPDU that has arrived, while the queue pair has no area. `lock` guards the
	 * bytes, `area_lock` of the device the other two.
	 */
	u8 *partial;
	size_t partial_len;
	struct list_head partial_entry;
	unsigned long partial_since;
	/* The next rnic_stream_turn() resets the stream to free the memory of its partial FPDU. */
	bool evicted;
	/* Receives were flushed after the queue pair went to the error state. */
	bool flushed;
	void (*data_ready)(struct sock *sk);
	void (*write_space)(struct sock *sk);
	void (*state_change)(struct sock *sk);
};

/* A memory region of one of three kinds; see mr.c. */
struct rnic_mr {
	struct ib_mr base;
	struct ib_umem *umem;
	u64 *pages;
	/* For fast registration: room in `pages`, and the number of pages that are listed there. */
	u32 max_pages;
	u32 num_pages;
};

static inline struct rnic_qp *to_qp(struct ib_qp *qp)
{
	return container_of(qp, struct rnic_qp, base);
}

/* Makes the next rnic_stream_turn() reset the stream, if there is one. Called with the lock. */
static inline void rnic_give_up(struct rnic_qp *qp)
{
	if (qp->stream_state != RNIC_STREAM_NONE)
		qp->stream_state = RNIC_STREAM_GIVEN_UP;
}

static inline struct rnic_cq *to_cq(struct ib_cq *cq)
{
	return container_of(cq, struct rnic_cq, base);
}

static inline struct rnic_srq *to_srq(struct ib_srq *srq)
{
	return container_of(srq, struct rnic_srq, base);
}

static inline struct rnic_device *to_device(struct ib_device *device)
{
	return container_of(device, struct rnic_device, base);
}

static inline struct rnic_pd *to_pd(struct ib_pd *pd)
{
	return container_of(pd, struct rnic_pd, base);
}

static inline struct rnic_mr *to_mr(struct ib_mr *mr)
{
	return container_of(mr, struct rnic_mr, base);
}

static inline struct rnic_ucontext *to_ucontext(struct ib_ucontext *context)
{
	return container_of(context, struct rnic_ucontext, base);
}

/* Returns true if the network device of a port can send and receive. */
static inline bool rnic_link_is_up(const struct net_device *netdev)
{
	return netif_running(netdev) && netif_carrier_ok(netdev);
}

/* device.c */
int rnic_device_add(const char *name, struct net_device *netdev);
void rnic_memory_unused(struct rnic_device *device);

/* net.c */
int rnic_net_init(void);
void rnic_net_exit(void);
void rnic_net_add(struct rnic_device *device);
void rnic_net_remove(struct rnic_device *device);
int rnic_create_socket(struct ib_device *base, const struct sockaddr_storage *address,
		       struct socket **socket);
void rnic_close_socket(struct socket *socket, bool reset);

/* area.c */
int rnic_area_reserve(struct rnic_device *device);
bool rnic_area_borrow(struct rnic_qp *qp);
bool rnic_area_borrow_to_receive(struct rnic_qp *qp);
bool rnic_area_borrow_or_make(struct rnic_qp *qp);
void rnic_area_return(struct rnic_qp *qp);
void rnic_area_release(struct rnic_qp *qp);
size_t rnic_partial_refuse(struct rnic_qp *qp, size_t consumed);
void rnic_partial_drop(struct rnic_qp *qp);
void rnic_areas_free(struct rnic_device *device);

/* map.c */
struct rnic_ucontext *rnic_context_of(struct ib_udata *udata);
void *rnic_queue_memory(struct rnic_ucontext *context, size_t octets,
			struct rdma_user_mmap_entry **mapping, u64 *key);
void rnic_queue_memory_free(void *memory, struct rdma_user_mmap_entry *mapping);
int rnic_mmap(struct ib_ucontext *context, struct vm_area_struct *area);
void rnic_mmap_free(struct rdma_user_mmap_entry *entry);

/* cq.c */
int rnic_create_cq(struct ib_cq *base, const struct ib_cq_init_attr *attributes,
		   struct ib_udata *udata);
int rnic_destroy_cq(struct ib_cq *base, struct ib_udata *udata);
int rnic_poll_cq(struct ib_cq *base, int count, struct ib_wc *completions);
int rnic_req_notify_cq(struct ib_cq *base, enum ib_cq_notify_flags flags);
bool rnic_cq_notify(struct rnic_cq *cq);
void rnic_cq_remove_qp(struct rnic_cq *cq, const struct rnic_qp *qp);

/* mr.c */
struct ib_mr *rnic_reg_user_mr(struct ib_pd *pd, u64 start, u64 len, u64 iova, int rights,
			       struct ib_udata *udata);
struct ib_mr *rnic_get_dma_mr(struct ib_pd *pd, int rights);
struct ib_mr *rnic_alloc_mr(struct ib_pd *pd, enum ib_mr_type type, u32 max_pages);
int rnic_map_mr_sg(struct ib_mr *base, struct scatterlist *list, int count, unsigned int *offset);
int rnic_dereg_mr(struct ib_mr *base, struct ib_udata *udata);

/* ring.c */
int rnic_ring_create(struct rnic_ring *ring, struct rnic_ucontext *context, u32 count, size_t entry,
		     u64 *key);
void rnic_ring_free(struct rnic_ring *ring);
void rnic_take_irq_posts(struct rnic_qp *qp);
void rnic_complete_refused(struct rnic_qp *qp, u64 wr_id);
void rnic_take_sends(struct rnic_qp *qp);
int rnic_ring_add_receive(struct rnic_ring *ring, const struct ib_recv_wr *request);
bool rnic_receive_is_posted(const struct rnic_ring *ring, u32 offset);
bool rnic_take_receive(struct rnic_ring *ring, struct rk_receive *receive);
bool rnic_flush_receives(struct rnic_qp *qp);

/* srq.c */
int rnic_create_srq(struct ib_srq *base, struct ib_srq_init_attr *attributes,
		    struct ib_udata *udata);
int rnic_modify_srq(struct ib_srq *base, struct ib_srq_attr *attributes,
		    enum ib_srq_attr_mask mask, struct ib_udata *udata);
int rnic_query_srq(struct ib_srq *base, struct ib_srq_attr *attributes);
int rnic_destroy_srq(struct ib_srq *base, struct ib_udata *udata);
bool rnic_srq_take(struct rnic_srq *srq, struct rk_receive *receive);
void rnic_srq_notify(struct rnic_srq *srq);

/* qp.c */
void rnic_qp_get(struct ib_qp *qp);
void rnic_qp_put(struct ib_qp *qp);
struct ib_qp *rnic_iw_get_qp(struct ib_device *base, int number);
void rnic_iw_add_ref(struct ib_qp *qp);
struct rnic_qp *rnic_find_qp(struct ib_device *device, int number);
int rnic_create_qp(struct ib_qp *base, struct ib_qp_init_attr *attributes, struct ib_udata *udata);
int rnic_modify_qp(struct ib_qp *base, struct ib_qp_attr *attributes, int mask,
		   struct ib_udata *udata);
int rnic_query_qp(struct ib_qp *base, struct ib_qp_attr *attributes, int mask,
		  struct ib_qp_init_attr *init);
int rnic_destroy_qp(struct ib_qp *base, struct ib_udata *udata);

/* post.c */
int rnic_post_send(struct ib_qp *base, const struct ib_send_wr *requests,
		   const struct ib_send_wr **bad);
int rnic_post_recv(struct ib_qp *base, const struct ib_recv_wr *requests,
		   const struct ib_recv_wr **bad);
int rnic_post_srq_recv(struct ib_srq *base, const struct ib_recv_wr *requests,
		       const struct ib_recv_wr **bad);

/* send.c */
int rnic_transmit(struct rnic_qp *qp, struct sock *sk);
void rnic_record_sent(struct rnic_device *device, struct rnic_qp *qp, size_t octets);
int rnic_stream_send(struct rnic_qp *qp);
void rnic_stream_push(struct rnic_qp *qp, struct sock *sk);
void rnic_stream_failed(struct rnic_qp *qp);
void rnic_send_init(struct rnic_qp *qp);
void rnic_send_soon(struct rnic_qp *qp);
void rnic_send_tasklet(struct tasklet_struct *tasklet);
void rnic_receive_begins(struct rnic_qp *qp);
void rnic_receive_ends(struct rnic_qp *qp, bool due);

/* stream.c */
void rnic_stream_init(struct rnic_qp *qp);
void rnic_stream_free(struct rnic_qp *qp);
void rnic_stream_attach(struct rnic_qp *qp, struct socket *socket, struct iw_cm_id *id);
void rnic_stream_kick(struct rnic_qp *qp);
void rnic_stream_turn(struct rnic_qp *qp);
bool rnic_apply_effects(struct rnic_qp *qp);

/* cm.c */
int rnic_connect(struct iw_cm_id *id, struct iw_cm_conn_param *param);
int rnic_accept(struct iw_cm_id *id, struct iw_cm_conn_param *param);
int rnic_reject(struct iw_cm_id *id, const void *private_data, u8 octets);
int rnic_create_listen(struct iw_cm_id *id, int backlog);
int rnic_destroy_listen(struct iw_cm_id *id);

#endif
