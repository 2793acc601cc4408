// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * The TCP connection of a queue pair after MPA start-up: receiving, and the end. send.c contains
 * sending; kernel/README.md describes the order of locks.
 *
 * Data are received in softirq, in sk_data_ready, where the network stack holds the socket's lock.
 * A work item does everything that may sleep.
 */
#include <linux/skbuff.h>
#include <linux/tcp.h>
#include <net/sock.h>
#include <net/tcp.h>
#include <rdma/iw_cm.h>

#include "rnic.h"

/* Maximum number of bytes that one call receives, before other work can use the processor. */
#define RECEIVE_AT_ONCE (256 * 1024)
/*
 * How long a connection that this side has closed waits for the peer to close. A kernel client
 * keeps the queue pair until the end of the connection is reported.
 */
#define LINGER (60 * HZ)

/* ---- receiving ---- */

/*
 * Passes one part of a packet to the engine. Returns how many bytes were consumed, and stores in
 * `proceed` whether the engine takes more.
 */
static size_t feed_engine(struct rnic_device *device, struct rnic_qp *qp, const u8 *octets,
			  size_t len, bool *proceed)
{
	size_t done = 0, taken;
	int status = 0;

	while (done < len && !status) {
		if (rk_rx_interest(qp->engine) == RK_RX_DISCARD)
			return len;
		read_lock(&device->table_lock);
		status = rk_rx_input(qp->engine, device->engine, octets + done, len - done,
				     &taken);
		read_unlock(&device->table_lock);
		done += taken;
		if (!taken)
			break;
	}
	*proceed = !status;
	/* If the stream has failed, discard the rest. */
	return status < 0 ? len : done;
}

static int take_packet(read_descriptor_t *descriptor, struct sk_buff *skb, unsigned int offset,
		       size_t len)
{
	struct rnic_qp *qp = descriptor->arg.data;
	struct rnic_device *device = to_device(qp->base.device);
	struct skb_seq_state state;
	unsigned int consumed = 0, part, refused;
	bool proceed = true, unused;
	const u8 *octets;

	spin_lock_bh(&qp->lock);
	skb_prepare_seq_read(skb, offset, offset + len, &state);
	while (proceed && (part = skb_seq_read(consumed, &octets, &state)))
		consumed += feed_engine(device, qp, octets, part, &proceed);
	skb_abort_seq_read(&state);
	refused = rnic_partial_refuse(qp, consumed);
	consumed -= refused;
	read_lock(&device->table_lock);
	unused = rk_take_unused(device->engine);
	read_unlock(&device->table_lock);
	spin_unlock_bh(&qp->lock);
	if (unused)
		rnic_memory_unused(device);
	descriptor->count -= min_t(size_t, descriptor->count, consumed);
	if (!proceed || refused)
		descriptor->count = 0;
	return consumed;
}

/*
 * Reports the end of the stream to the engine if the peer has closed and all data were read. Called
 * with the socket's lock and the queue pair's lock.
 */
static void report_end(struct rnic_qp *qp, struct sock *sk)
{
	if (rk_qp_peer_has_closed(qp->engine) || !skb_queue_empty(&sk->sk_receive_queue)) {
		/* Reported already, or there is more to read. */
	} else if (sk->sk_err) {
		rk_stream_failed(qp->engine);
	} else if (sk->sk_shutdown & RCV_SHUTDOWN) {
		rk_rx_eof(qp->engine);
	}
}

/*
 * Receives the data that have arrived. Called with the socket's lock. Returns true if there is more
 * for another call.
 */
static bool receive(struct rnic_qp *qp, struct sock *sk)
{
	read_descriptor_t descriptor = { .arg.data = qp, .count = RECEIVE_AT_ONCE };
	int interest;
	bool ready;

	spin_lock_bh(&qp->lock);
	interest = rk_rx_interest(qp->engine);
	ready = rnic_area_borrow_to_receive(qp);
	spin_unlock_bh(&qp->lock);
	/* The work item will allocate an area. */
	if (!ready)
		return true;
	/* Also if the engine waits: pass it the data again that it could not take before. */
	if (interest != RK_RX_NONE) {
		/*
		 * MPA does not use urgent data. Clear the mark: tcp_read_sock() would stop before
		 * the urgent byte.
		 */
		WRITE_ONCE(tcp_sk(sk)->urg_data, 0);
		tcp_read_sock(sk, &descriptor, take_packet);
	}
	spin_lock_bh(&qp->lock);
	report_end(qp, sk);
	rnic_area_return(qp);
	interest = rk_rx_interest(qp->engine);
	spin_unlock_bh(&qp->lock);
	/*
	 * Data to discard are read to the end, too: while they fill the receive queue, the peer
	 * cannot send anything that would cause another call.
	 */
	return !descriptor.count && (interest == RK_RX_READ || interest == RK_RX_DISCARD) &&
	       !skb_queue_empty(&sk->sk_receive_queue);
}

static void data_ready(struct sock *sk)
{
	struct rnic_qp *qp;
	bool more;

	read_lock_bh(&sk->sk_callback_lock);
	qp = sk->sk_user_data;
	if (!qp)
		goto unlock;
	rnic_receive_begins(qp);
	more = receive(qp, sk);
	/* The peer's responses may have completed requests, which makes room for pending ones. */
	rnic_receive_ends(qp, rnic_apply_effects(qp));
	if (more || sk->sk_state == TCP_CLOSE)
		rnic_stream_kick(qp);
unlock:
	read_unlock_bh(&sk->sk_callback_lock);
}

/* For a FIN, the stack calls sk_data_ready, too, so only the final state matters here. */
static void state_change(struct sock *sk)
{
	if (sk->sk_state == TCP_CLOSE)
		data_ready(sk);
}

static void write_space(struct sock *sk)
{
	struct rnic_qp *qp;

	read_lock_bh(&sk->sk_callback_lock);
	qp = sk->sk_user_data;
	if (qp && sk_stream_is_writeable(sk)) {
		clear_bit(SOCK_NOSPACE, &sk->sk_socket->flags);
		rnic_send_soon(qp);
	}
	read_unlock_bh(&sk->sk_callback_lock);
}

/* ---- start and end of the stream ---- */

/*
 * Attaches the connection to a queue pair. The caller holds the mutex and the socket's lock, and
 * the engine has started.
 */
void rnic_stream_attach(struct rnic_qp *qp, struct socket *socket, struct iw_cm_id *id)
{
	struct sock *sk = socket->sk;

	rnic_qp_get(&qp->base);
	id->add_ref(id);
	qp->id = id;
	qp->socket = socket;
	qp->flushed = false;
	qp->evicted = false;
	/* Data are sent from softirq, too. */
	sk->sk_allocation = GFP_ATOMIC;
	rnic_forbid_task_frag(sk);
	write_lock_bh(&sk->sk_callback_lock);
	qp->data_ready = sk->sk_data_ready;
	qp->write_space = sk->sk_write_space;
	qp->state_change = sk->sk_state_change;
	sk->sk_user_data = qp;
	sk->sk_data_ready = data_ready;
	sk->sk_write_space = write_space;
	sk->sk_state_change = state_change;
	write_unlock_bh(&sk->sk_callback_lock);
	WRITE_ONCE(qp->sk, sk);
}

/*
 * Detaches the connection. TCP then sends its queued data, or a reset if `reset` is set. The caller
 * holds the mutex.
 */
static void detach(struct rnic_qp *qp, bool reset)
{
	struct iw_cm_event event = { .event = IW_CM_EVENT_CLOSE };
	struct rnic_device *device = to_device(qp->base.device);
	struct socket *socket = qp->socket;
	struct iw_cm_id *id = qp->id;
	struct sock *sk = socket->sk;

	write_lock_bh(&sk->sk_callback_lock);
	sk->sk_data_ready = qp->data_ready;
	sk->sk_write_space = qp->write_space;
	sk->sk_state_change = qp->state_change;
	sk->sk_user_data = NULL;
	write_unlock_bh(&sk->sk_callback_lock);
	spin_lock_bh(&qp->lock);
	WRITE_ONCE(qp->sk, NULL);
	qp->stream_state = RNIC_STREAM_NONE;
	spin_unlock_bh(&qp->lock);
	tasklet_kill(&qp->sender);
	qp->socket = NULL;
	qp->id = NULL;
	rnic_close_socket(socket, reset);
	/* The socket no longer uses the plan's memory. */
	rnic_record_sent(device, qp, 0);
	spin_lock_bh(&qp->lock);
	rnic_partial_drop(qp);
	rk_qp_stream_gone(qp->engine);
	rnic_area_return(qp);
	spin_unlock_bh(&qp->lock);
	rnic_apply_effects(qp);
	id->event_handler(id, &event);
	id->rem_ref(id);
	rnic_qp_put(&qp->base);
}

/*
 * Returns true if the stream must be reset: rnic_give_up() was called, its peer was silent for too
 * long, or TCP is closed and the engine expects no more data. Called with the queue pair's lock.
 */
static bool must_reset(const struct rnic_qp *qp)
{
	return qp->stream_state == RNIC_STREAM_GIVEN_UP || READ_ONCE(qp->evicted) ||
	       (rk_rx_interest(qp->engine) == RK_RX_NONE && qp->sk->sk_state == TCP_CLOSE);
}

/*
 * Returns true if this side is shut down, and either the peer has closed its side or the deadline
 * has passed. TCP delivers the remaining data by itself. Called with the queue pair's lock.
 */
static bool may_leave(const struct rnic_qp *qp)
{
	return rk_qp_is_shut_down(qp->engine) &&
	       (rk_qp_peer_has_closed(qp->engine) || time_after_eq(jiffies, qp->deadline));
}

/* Starts or restarts the time limit for the peer. Called with the queue pair's lock. */
static void begin_ending(struct rnic_qp *qp)
{
	if (qp->stream_state == RNIC_STREAM_UP)
		qp->stream_state = RNIC_STREAM_ENDING;
	qp->acknowledged = READ_ONCE(tcp_sk(qp->sk)->snd_una);
	qp->deadline = jiffies + LINGER;
}

/*
 * Returns true if the deadline has passed while data that precede the end, such as a Terminate, are
 * still unsent. Each acknowledgement of the peer restarts the time limit. Called with the queue
 * pair's lock.
 */
static bool peer_stalled(struct rnic_qp *qp)
{
	if (!rk_qp_is_ending(qp->engine) || rk_qp_is_shut_down(qp->engine))
		return false;
	if (qp->stream_state == RNIC_STREAM_UP ||
	    qp->acknowledged != READ_ONCE(tcp_sk(qp->sk)->snd_una))
		begin_ending(qp);
	return time_after_eq(jiffies, qp->deadline);
}

/* Returns what to do with the stream now, as enum rk_wish. Called with the queue pair's lock. */
static int next_step(struct rnic_qp *qp)
{
	int wish = rk_qp_wish(qp->engine);

	if (must_reset(qp) || peer_stalled(qp))
		return RK_WISH_ABORT;
	return wish == RK_WISH_KEEP && may_leave(qp) ? RK_WISH_LEAVE : wish;
}

/* Shuts down, closes or resets the stream if next_step() says so. The caller holds the mutex. */
static void end_stream(struct rnic_qp *qp)
{
	int step;

	spin_lock_bh(&qp->lock);
	step = next_step(qp);
	spin_unlock_bh(&qp->lock);
	if (step == RK_WISH_SHUTDOWN) {
		kernel_sock_shutdown(qp->socket, SHUT_WR);
		spin_lock_bh(&qp->lock);
		rk_qp_shutdown_done(qp->engine);
		begin_ending(qp);
		step = next_step(qp);
		spin_unlock_bh(&qp->lock);
	}
	if (step == RK_WISH_ABORT)
		detach(qp, true);
	else if (step == RK_WISH_LEAVE)
		detach(qp, false);
}

/*
 * Handles expired timers, and retries requests that wait for memory and Sends that wait for a
 * receive. Called with the socket's lock.
 */
static void retry_pending(struct rnic_qp *qp)
{
	struct rnic_device *device = to_device(qp->base.device);
	u64 now = ktime_get_ns();
	size_t taken;

	spin_lock_bh(&qp->lock);
	if (rk_poll_at(qp->engine) <= now) {
		if (rk_rx_interest(qp->engine) == RK_RX_WAIT && qp->sk->sk_shutdown & RCV_SHUTDOWN)
			rk_sender_closed(qp->engine);
		rk_on_time(qp->engine, now);
	}
	if (rk_waits_for_memory(qp->engine))
		rk_retry_memory(qp->engine);
	if (rk_rx_interest(qp->engine) == RK_RX_WAIT && rnic_area_borrow_to_receive(qp)) {
		read_lock(&device->table_lock);
		rk_rx_input(qp->engine, device->engine, NULL, 0, &taken);
		read_unlock(&device->table_lock);
	}
	spin_unlock_bh(&qp->lock);
}

/* Receives and sends the data that earlier calls could not. The caller holds the mutex. */
static void resume_io(struct rnic_qp *qp)
{
	int result;
	bool more;

	if (!rnic_area_borrow_or_make(qp)) {
		timer_reduce(&qp->timer, jiffies + 1);
		return;
	}
	lock_sock(qp->sk);
	retry_pending(qp);
	more = receive(qp, qp->sk);
	result = rnic_transmit(qp, qp->sk);
	release_sock(qp->sk);
	if (result && result != -EAGAIN)
		rnic_stream_failed(qp);
	if (more || result == -EAGAIN)
		rnic_stream_kick(qp);
}

/* Receives, sends, ends the stream and flushes requests, as far as possible now. May sleep. */
void rnic_stream_turn(struct rnic_qp *qp)
{
	bool more;

	mutex_lock(&qp->mutex);
	if (qp->sk) {
		resume_io(qp);
		end_stream(qp);
	}
	do {
		spin_lock_bh(&qp->lock);
		rnic_take_sends(qp);
		more = rnic_flush_receives(qp);
		qp->flushed = !more && rk_qp_state(qp->engine) == RK_STATE_ERROR;
		spin_unlock_bh(&qp->lock);
		cond_resched();
	} while (more);
	mutex_unlock(&qp->mutex);
	rnic_apply_effects(qp);
}

static void stream_work(struct work_struct *work)
{
	struct rnic_qp *qp = container_of(work, struct rnic_qp, work);

	rnic_stream_turn(qp);
	rnic_qp_put(&qp->base);
}

/* Queues the work item that calls rnic_stream_turn(). Any context. */
void rnic_stream_kick(struct rnic_qp *qp)
{
	/* The timer may fire while the queue pair is being destroyed. */
	if (kref_get_unless_zero(&qp->ref) && !queue_work(rnic_wq, &qp->work))
		rnic_qp_put(&qp->base);
}

static void timer_expired(struct timer_list *timer)
{
	rnic_stream_kick(container_of(timer, struct rnic_qp, timer));
}

/*
 * Sets the timer unless it already expires earlier. A program posts receives without a call, so a
 * Send that waits for a receive (`waits`) is retried at every tick.
 */
static void set_timer(struct rnic_qp *qp, u64 at, bool waits)
{
	u64 now;

	if (waits) {
		timer_reduce(&qp->timer, jiffies + 1);
	} else if (at != RK_NEVER) {
		/* Read the clock only if necessary: for some clocks, that takes microseconds. */
		now = ktime_get_ns();
		timer_reduce(&qp->timer, jiffies + 1 + (at > now ? nsecs_to_jiffies(at - now) : 0));
	}
}

/* The engine's events, and the corresponding events of ib_verbs.h. */
static const struct {
	enum rk_event what;
	enum ib_event_type event;
} qp_events[] = {
	{ RK_EVENT_MESSAGE_IN_RTR, IB_EVENT_COMM_EST },
	{ RK_EVENT_ACCESS, IB_EVENT_QP_ACCESS_ERR },
	{ RK_EVENT_REQUEST, IB_EVENT_QP_REQ_ERR },
	{ RK_EVENT_FATAL, IB_EVENT_QP_FATAL },
	{ RK_EVENT_SQ_DRAINED, IB_EVENT_SQ_DRAINED },
	{ RK_EVENT_LAST_WQE, IB_EVENT_QP_LAST_WQE_REACHED },
};

/* Called without locks, because a handler may call the driver. */
static void raise_events(struct rnic_qp *qp, u32 events)
{
	struct ib_event event = { .device = qp->base.device, .element.qp = &qp->base };
	size_t i;

	/*
	 * In the engine, every queue pair has a shared receive queue. But this event must be
	 * reported only if the program has created one.
	 */
	if (!qp->base.srq)
		events &= ~RK_EVENT_LAST_WQE;
	for (i = 0; i < ARRAY_SIZE(qp_events); i++) {
		event.event = qp_events[i].event;
		if (events & qp_events[i].what && qp->base.event_handler)
			qp->base.event_handler(&event, qp->base.qp_context);
	}
}

/*
 * Handles the effects of previous calls of the engine: completions, events, and the end of the
 * stream. Returns true if there is something to send. Any context; the caller may hold the socket's
 * lock, but no lock of this module.
 */
bool rnic_apply_effects(struct rnic_qp *qp)
{
	bool more, act, ending, waits, due;
	unsigned long deadline;
	u32 events = 0;
	u64 at;

	do {
		spin_lock_bh(&qp->lock);
		more = rk_complete_due(qp->engine);
		events |= rk_take_events(qp->engine);
		act = rk_qp_wish(qp->engine) != RK_WISH_KEEP || may_leave(qp) ||
		      (rk_qp_is_ending(qp->engine) && qp->stream_state == RNIC_STREAM_UP) ||
		      (rk_qp_state(qp->engine) == RK_STATE_ERROR && !qp->flushed);
		waits = rk_rx_interest(qp->engine) == RK_RX_WAIT;
		at = rk_poll_at(qp->engine);
		due = rk_wants_tx(qp->engine) || qp->sends_pending;
		ending = qp->stream_state == RNIC_STREAM_ENDING;
		deadline = qp->deadline;
		spin_unlock_bh(&qp->lock);
	} while (more);
	if (!rnic_cq_notify(to_cq(qp->base.send_cq)) | !rnic_cq_notify(to_cq(qp->base.recv_cq))) {
		spin_lock_bh(&qp->lock);
		if (rk_qp_state(qp->engine) != RK_STATE_ERROR) {
			rk_qp_modify(qp->engine, RK_STATE_ERROR);
			events |= rk_take_events(qp->engine);
			act = true;
		}
		spin_unlock_bh(&qp->lock);
	}
	raise_events(qp, events);
	if (qp->base.srq)
		rnic_srq_notify(to_srq(qp->base.srq));
	if (!READ_ONCE(qp->sk))
		return false;
	if (act)
		rnic_stream_kick(qp);
	if (ending)
		timer_reduce(&qp->timer, deadline);
	set_timer(qp, at, waits);
	return due;
}

void rnic_stream_init(struct rnic_qp *qp)
{
	mutex_init(&qp->mutex);
	rnic_send_init(qp);
	INIT_WORK(&qp->work, stream_work);
	timer_setup(&qp->timer, timer_expired, 0);
}

void rnic_stream_free(struct rnic_qp *qp)
{
	tasklet_kill(&qp->sender);
	timer_shutdown_sync(&qp->timer);
	mutex_destroy(&qp->mutex);
}
