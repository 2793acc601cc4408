// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * Sends the data that the engine of a queue pair has for the peer. Only the holder of the socket's
 * lock sends.
 *
 * A program's requests are sent in its system call. A kernel client's requests are sent in the
 * client's call. If the client's completion queue is crowded, a work item sends them instead: many
 * requests are on their way then, so the work item sends those that are posted meanwhile together,
 * on another processor if one is idle. Responses to the peer are sent by a tasklet.
 *
 * Kernel clients often post on one processor while another processor sends or receives for the
 * same queue pair. The poster does not wait for the other processor. It sets RNIC_TX_DUE, and the
 * processor that has set RNIC_TX_SENDING or RNIC_TX_RECEIVING checks RNIC_TX_DUE after it has
 * cleared its own bit. Each processor changes its bit, executes a barrier, and then reads the
 * other's bit. So at least one of them sees what the other did.
 */
#include <linux/tcp.h>
#include <net/sock.h>
#include <net/tcp.h>

#include "rnic.h"

/* Maximum number of bytes that one call sends, before other work can use the processor. */
#define SEND_AT_ONCE (256 * 1024)
/*
 * How often one call sends requests that others have posted meanwhile. After that, the tasklet or
 * the work item continues.
 */
#define SEND_ROUNDS 8

/*
 * Fills the plan, and stores a pointer to its runs in `runs`. Returns the number of runs, 0 if
 * there is nothing to send, -EAGAIN if the budget of local requests is used up, or another error.
 * Called with the queue pair's lock.
 */
static int next_runs(struct rnic_device *device, struct rnic_qp *qp, const struct kvec **runs)
{
	int fill, count = 0;

	for (;;) {
		read_lock(&device->table_lock);
		fill = rk_tx_fill(qp->engine, device->engine);
		if (fill == RK_FILL_READY)
			count = rk_tx_runs(qp->engine, device->engine, runs);
		read_unlock(&device->table_lock);
		if (fill == RK_FILL_MORE)
			return -EAGAIN;
		if (fill != RK_FILL_MEMORY)
			return count;
		write_lock(&device->table_lock);
		rk_tx_memory(qp->engine, device->engine);
		write_unlock(&device->table_lock);
	}
}

/*
 * Records `octets` as sent. Returns true if memory that a queue pair waits for is no longer in use.
 * Called with the queue pair's lock.
 */
static bool record_sent(struct rnic_device *device, struct rnic_qp *qp, size_t octets)
{
	bool unused;

	read_lock(&device->table_lock);
	rk_tx_written(qp->engine, device->engine, octets);
	unused = rk_take_unused(device->engine);
	read_unlock(&device->table_lock);
	return unused;
}

/* Records `octets` as sent, and resumes the queue pairs that waited for the memory. */
void rnic_record_sent(struct rnic_device *device, struct rnic_qp *qp, size_t octets)
{
	bool unused;

	spin_lock_bh(&qp->lock);
	unused = record_sent(device, qp, octets);
	spin_unlock_bh(&qp->lock);
	if (unused)
		rnic_memory_unused(device);
}

/*
 * Sends pending data without sleeping. The caller holds the socket's lock. Returns -EAGAIN if there
 * may be more to send now. Returns 0 if all was sent, or if the socket is full: sk_write_space will
 * cause another call then.
 */
int rnic_transmit(struct rnic_qp *qp, struct sock *sk)
{
	struct rnic_device *device = to_device(qp->base.device);
	size_t done = 0, sent = 0;

	for (;;) {
		struct msghdr message = { .msg_flags = MSG_DONTWAIT | MSG_NOSIGNAL };
		int count = -EAGAIN, i;
		const struct kvec *runs;
		bool unused = false;
		size_t octets = 0;

		spin_lock_bh(&qp->lock);
		if (sent)
			unused = record_sent(device, qp, sent);
		rnic_take_sends(qp);
		if (done < SEND_AT_ONCE && rnic_area_borrow(qp))
			count = next_runs(device, qp, &runs);
		if (count <= 0)
			rnic_area_return(qp);
		spin_unlock_bh(&qp->lock);
		if (unused)
			rnic_memory_unused(device);
		if (count <= 0)
			return count;
		for (i = 0; i < count; i++)
			octets += runs[i].iov_len;
		iov_iter_kvec(&message.msg_iter, ITER_SOURCE, runs, count, octets);
		count = tcp_sendmsg_locked(sk, &message, octets);
		/*
		 * TCP had no memory, and no data are in flight, so no acknowledgement will trigger
		 * sk_write_space. Use the timer.
		 */
		if (count == -EAGAIN && tcp_rtx_and_write_queues_empty(sk))
			timer_reduce(&qp->timer, jiffies + 1);
		if (count <= 0) {
			/*
			 * Between two calls of TCP nothing refers to the memory, so a peer that
			 * does not read cannot delay a deregistration. If the memory is gone at the
			 * next call, the stream fails.
			 */
			rnic_record_sent(device, qp, 0);
			return count == -EAGAIN ? 0 : count;
		}
		sent = count;
		done += sent;
	}
}

void rnic_stream_failed(struct rnic_qp *qp)
{
	spin_lock_bh(&qp->lock);
	rk_stream_failed(qp->engine);
	spin_unlock_bh(&qp->lock);
}

static void after_transmit(struct rnic_qp *qp, int result)
{
	if (result && result != -EAGAIN)
		rnic_stream_failed(qp);
	rnic_apply_effects(qp);
	if (result == -EAGAIN)
		rnic_stream_kick(qp);
}

int rnic_stream_send(struct rnic_qp *qp)
{
	struct sock *sk;
	int result = 0;

	mutex_lock(&qp->mutex);
	sk = qp->sk;
	if (sk) {
		lock_sock(sk);
		result = rnic_transmit(qp, sk);
		release_sock(sk);
	} else {
		/* Without a connection, requests are flushed if the queue pair is in error. */
		spin_lock_bh(&qp->lock);
		rnic_take_sends(qp);
		spin_unlock_bh(&qp->lock);
	}
	mutex_unlock(&qp->mutex);
	after_transmit(qp, result);
	return 0;
}

/*
 * Sends once. The caller has set RNIC_TX_SENDING. Returns -EBUSY if `wait` is not set and the stack
 * holds the socket's lock on another processor. Returns -EAGAIN if the queue pair's work item will
 * continue, because SEND_AT_ONCE is reached or a process owns the socket.
 */
static int send_once(struct rnic_qp *qp, struct sock *sk, bool wait)
{
	int result = 0;

	if (wait)
		bh_lock_sock(sk);
	else if (!spin_trylock(&sk->sk_lock.slock))
		return -EBUSY;
	if (sock_owned_by_user(sk))
		result = -EAGAIN;
	else if (READ_ONCE(qp->sk) == sk)
		result = rnic_transmit(qp, sk);
	else
		/*
		 * The connection was detached. The tasklet sends on the next connection, or flushes
		 * the requests that were posted with interrupts off.
		 */
		tasklet_schedule(&qp->sender);
	bh_unlock_sock(sk);
	after_transmit(qp, result);
	return result;
}

/* Returns true if another processor will check RNIC_TX_DUE, which the caller has set. */
static bool other_will_check(struct rnic_qp *qp)
{
	smp_mb__after_atomic();
	return READ_ONCE(qp->tx) & (BIT(RNIC_TX_SENDING) | BIT(RNIC_TX_RECEIVING));
}

/*
 * Sends pending data, unless another processor does. If `wait` is set, waits until the stack on
 * another processor releases the socket's lock; the network stack must not be among the callers in
 * this case. Returns true if the caller must schedule another call. Bottom halves are off.
 */
static bool send_due(struct rnic_qp *qp, struct sock *sk, bool wait)
{
	int rounds, result = 0;

	set_bit(RNIC_TX_DUE, &qp->tx);
	for (rounds = SEND_ROUNDS; rounds && !result; rounds--) {
		if (other_will_check(qp) || test_and_set_bit(RNIC_TX_SENDING, &qp->tx))
			return false;
		clear_bit(RNIC_TX_DUE, &qp->tx);
		smp_mb__after_atomic();
		result = send_once(qp, sk, wait);
		if (result == -EBUSY)
			set_bit(RNIC_TX_DUE, &qp->tx);
		clear_bit_unlock(RNIC_TX_SENDING, &qp->tx);
		smp_mb__after_atomic();
		if (!test_bit(RNIC_TX_DUE, &qp->tx))
			return false;
	}
	return true;
}

/* Any context. */
static void queue_send_work(struct rnic_qp *qp)
{
	if (kref_get_unless_zero(&qp->ref) && !queue_work(rnic_send_wq, &qp->send_work))
		rnic_qp_put(&qp->base);
}

static void send_work(struct work_struct *work)
{
	struct rnic_qp *qp = container_of(work, struct rnic_qp, send_work);
	struct sock *sk;
	bool more = false;

	local_bh_disable();
	spin_lock(&qp->lock);
	sk = qp->sk;
	if (sk)
		sock_hold(sk);
	spin_unlock(&qp->lock);
	if (sk) {
		more = send_due(qp, sk, true);
		sock_put(sk);
	}
	local_bh_enable();
	if (more)
		queue_send_work(qp);
	rnic_qp_put(&qp->base);
}

/*
 * Sends the requests that a kernel client has posted, or schedules that. The caller holds a
 * reference to the socket. Bottom halves are off.
 */
void rnic_stream_push(struct rnic_qp *qp, struct sock *sk)
{
	if (READ_ONCE(to_cq(qp->base.recv_cq)->crowded)) {
		set_bit(RNIC_TX_DUE, &qp->tx);
		if (!other_will_check(qp))
			queue_send_work(qp);
	} else if (send_due(qp, sk, false)) {
		tasklet_schedule(&qp->sender);
	}
}

void rnic_send_init(struct rnic_qp *qp)
{
	tasklet_setup(&qp->sender, rnic_send_tasklet);
	INIT_WORK(&qp->send_work, send_work);
}

/* Schedules the tasklet that sends. Any context. */
void rnic_send_soon(struct rnic_qp *qp)
{
	set_bit(RNIC_TX_DUE, &qp->tx);
	if (!other_will_check(qp))
		tasklet_schedule(&qp->sender);
}

/*
 * Marks the start of receiving. Until rnic_receive_ends(), the stack holds the socket's lock;
 * requests that are posted meanwhile are sent afterwards.
 */
void rnic_receive_begins(struct rnic_qp *qp)
{
	set_bit(RNIC_TX_RECEIVING, &qp->tx);
}

void rnic_receive_ends(struct rnic_qp *qp, bool due)
{
	clear_bit_unlock(RNIC_TX_RECEIVING, &qp->tx);
	smp_mb__after_atomic();
	if (due || test_bit(RNIC_TX_DUE, &qp->tx))
		rnic_send_soon(qp);
}

/*
 * Sends responses, and requests that were posted with interrupts off. Runs after the network stack,
 * on the processor that has received.
 */
void rnic_send_tasklet(struct tasklet_struct *tasklet)
{
	struct rnic_qp *qp = from_tasklet(qp, tasklet, sender);
	struct sock *sk = READ_ONCE(qp->sk);
	bool awaited;

	spin_lock_bh(&qp->lock);
	rnic_take_irq_posts(qp);
	/*
	 * If a receive was posted with interrupts off, a Send may wait for it, or it may have to be
	 * flushed.
	 */
	awaited = rk_rx_interest(qp->engine) == RK_RX_WAIT ||
		  rk_qp_state(qp->engine) == RK_STATE_ERROR;
	spin_unlock_bh(&qp->lock);
	if (awaited)
		rnic_stream_kick(qp);
	if (!sk)
		rnic_apply_effects(qp);
	else if (send_due(qp, sk, true))
		tasklet_schedule(&qp->sender);
}
