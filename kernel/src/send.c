// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * Sends what the engine of a queue pair has for the peer. The holder of the socket's lock is the only sender.
 *
 * A program's requests are sent in its system call. Requests of a client in the kernel are sent in the client's call. If the client's receive
 * queue is crowded, they are sent by a work instead: many requests are then on their way, so a work collects those that are posted
 * meanwhile and sends them together, and on another processor if there is an idle one. Answers are sent by a tasklet.
 *
 * Clients in the kernel often post on one processor while another one sends or receives for the same queue pair. The poster does not wait for
 * the other: it sets RNIC_TX_DUE, and the processor that has RNIC_TX_SENDING or RNIC_TX_RECEIVING looks at RNIC_TX_DUE after it has cleared
 * its own bit. Both change their bit, pass a barrier, and then read the other's bit. So at least one of them sees what the other did.
 */
#include <linux/tcp.h>
#include <net/sock.h>
#include <net/tcp.h>

#include "rnic.h"

/* Octets that one call sends. Whoever wants to go on lets others have the processor first. */
#define SEND_AT_ONCE (256 * 1024)
/* How often one call sends what others have posted meanwhile, before it leaves that to the tasklet or the work. */
#define TURNS 8

/*
 * Fills the plan and hands out what to send. Returns the number of runs, 0 if there is nothing, -EAGAIN if local requests had enough of this
 * call, or another error. Called with the lock.
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

/* Notes how much was sent. Returns true if somebody waited for that memory. Called with the lock. */
static bool note(struct rnic_device *device, struct rnic_qp *qp, size_t octets)
{
	bool unused;

	read_lock(&device->table_lock);
	rk_tx_written(qp->engine, device->engine, octets);
	unused = rk_take_unused(device->engine);
	read_unlock(&device->table_lock);
	return unused;
}

/* Notes how much was sent, and lets those go on who waited for that memory. */
void rnic_written(struct rnic_device *device, struct rnic_qp *qp, size_t octets)
{
	bool unused;

	spin_lock_bh(&qp->lock);
	unused = note(device, qp, octets);
	spin_unlock_bh(&qp->lock);
	if (unused)
		rnic_memory_unused(device);
}

/*
 * Sends what is due, without sleeping. The caller has the socket's lock. Returns -EAGAIN if there may be more to do. Without room in the
 * socket it returns 0, because sk_write_space calls again.
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
			unused = note(device, qp, sent);
		rnic_take_sends(qp);
		if (done < SEND_AT_ONCE && rnic_area_take(qp))
			count = next_runs(device, qp, &runs);
		if (count <= 0)
			rnic_area_give(qp);
		spin_unlock_bh(&qp->lock);
		if (unused)
			rnic_memory_unused(device);
		if (count <= 0)
			return count;
		for (i = 0; i < count; i++)
			octets += runs[i].iov_len;
		iov_iter_kvec(&message.msg_iter, ITER_SOURCE, runs, count, octets);
		count = tcp_sendmsg_locked(sk, &message, octets);
		/* It had no memory: nothing is on its way whose acknowledgement would call. */
		if (count == -EAGAIN && tcp_rtx_and_write_queues_empty(sk))
			timer_reduce(&qp->timer, jiffies + 1);
		if (count <= 0)
			return count == -EAGAIN ? 0 : count;
		sent = count;
		done += sent;
	}
}

/* TCP does not take any more. */
void rnic_stream_fails(struct rnic_qp *qp)
{
	spin_lock_bh(&qp->lock);
	rk_stream_failed(qp->engine);
	spin_unlock_bh(&qp->lock);
}

/* Does what follows from sending. */
static void after_transmit(struct rnic_qp *qp, int result)
{
	if (result && result != -EAGAIN)
		rnic_stream_fails(qp);
	rnic_settle(qp);
	if (result == -EAGAIN)
		rnic_stream_kick(qp);
}

/* Sends in the system call of the program. */
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
 * Sends once. The caller has RNIC_TX_SENDING. Returns -EBUSY if the stack has the socket on another processor and `wait` is not set, and -EAGAIN
 * if the queue pair's work goes on: there is more than one call may send, or a process has the socket.
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
		/* The connection was taken away. The tasklet finds the next one, or ends what was posted late. */
		tasklet_schedule(&qp->sender);
	bh_unlock_sock(sk);
	after_transmit(qp, result);
	return result;
}

/* Returns true if another call is going to look at RNIC_TX_DUE, which the caller has set. */
static bool is_seen(struct rnic_qp *qp)
{
	smp_mb__after_atomic();
	return READ_ONCE(qp->tx) & (BIT(RNIC_TX_SENDING) | BIT(RNIC_TX_RECEIVING));
}

/*
 * Sends what is due, unless another call does that. With `wait` it waits until the stack of another processor has done with the socket; the stack
 * must not be among its callers then. Returns true if the caller has to have it called once more. Bottom halves are off.
 */
static bool send_due(struct rnic_qp *qp, struct sock *sk, bool wait)
{
	int turns, result = 0;

	set_bit(RNIC_TX_DUE, &qp->tx);
	for (turns = TURNS; turns && !result; turns--) {
		if (is_seen(qp) || test_and_set_bit(RNIC_TX_SENDING, &qp->tx))
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

/* Has the work send. Any context. */
static void queue(struct rnic_qp *qp)
{
	if (kref_get_unless_zero(&qp->ref) && !queue_work(rnic_sends, &qp->send_work))
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
		queue(qp);
	rnic_qp_put(&qp->base);
}

/* Sends what a client in the kernel has posted, here or soon. The caller has a reference to the socket. Bottom halves are off. */
void rnic_stream_push(struct rnic_qp *qp, struct sock *sk)
{
	if (READ_ONCE(to_cq(qp->base.recv_cq)->crowded)) {
		set_bit(RNIC_TX_DUE, &qp->tx);
		if (!is_seen(qp))
			queue(qp);
	} else if (send_due(qp, sk, false)) {
		tasklet_schedule(&qp->sender);
	}
}

void rnic_send_init(struct rnic_qp *qp)
{
	tasklet_setup(&qp->sender, rnic_send_tasklet);
	INIT_WORK(&qp->send_work, send_work);
}

/* Has the tasklet send. Any context. */
void rnic_send_soon(struct rnic_qp *qp)
{
	set_bit(RNIC_TX_DUE, &qp->tx);
	if (!is_seen(qp))
		tasklet_schedule(&qp->sender);
}

/* From here to rnic_receive_ends the stack has the socket. What is posted meanwhile is sent afterwards. */
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

/* Sends answers, and what was posted with interrupts off. It runs on the processor that has received, behind the stack. */
void rnic_send_tasklet(struct tasklet_struct *tasklet)
{
	struct rnic_qp *qp = from_tasklet(qp, tasklet, sender);
	struct sock *sk = READ_ONCE(qp->sk);
	bool awaited;

	spin_lock_bh(&qp->lock);
	rnic_take_late(qp);
	/* A receive that was posted with interrupts off may be one to flush, or one that a Send waits for. */
	awaited = rk_rx_interest(qp->engine) == RK_RX_WAIT ||
		  rk_qp_state(qp->engine) == RK_STATE_ERROR;
	spin_unlock_bh(&qp->lock);
	if (awaited)
		rnic_stream_kick(qp);
	if (!sk)
		rnic_settle(qp);
	else if (send_due(qp, sk, true))
		tasklet_schedule(&qp->sender);
}
