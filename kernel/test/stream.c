// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * Tests over a TCP connection in the kernel. Received data are processed in softirq; each endpoint
 * has a thread that sends.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt
#include <linux/err.h>
#include <linux/in.h>
#include <linux/kthread.h>
#include <linux/skbuff.h>
#include <linux/string.h>
#include <linux/tcp.h>
#include <linux/uio.h>
#include <net/sock.h>
#include <net/tcp.h>

#include "test.h"

static void kick(struct endpoint *ep)
{
	WRITE_ONCE(ep->kicked, true);
	wake_up(&ep->work);
}

/* ---- receiving ---- */

/* Passes bytes to the engine. Returns how many bytes it has consumed. */
static size_t feed_engine(struct endpoint *ep, const u8 *octets, size_t len)
{
	size_t taken;
	int status = rk_rx_input(ep->qp, ep->device, octets, len, &taken);

	if (status < 0)
		ep->error = status;
	ep->held = status == RK_RX_HELD || status == RK_RX_WAITS;
	return taken;
}

/*
 * Passes a packet to the engine without copying it. Called by tcp_read_sock() with the socket's
 * lock and the endpoint's lock.
 */
static int take(read_descriptor_t *descriptor, struct sk_buff *skb, unsigned int offset, size_t len)
{
	struct endpoint *ep = descriptor->arg.data;
	struct skb_seq_state state;
	unsigned int used = 0, part;
	const u8 *octets;

	skb_prepare_seq_read(skb, offset, offset + len, &state);
	do {
		part = skb_seq_read(used, &octets, &state);
		if (part)
			used += feed_engine(ep, octets, part);
	} while (part && !ep->held && !ep->error);
	skb_abort_seq_read(&state);
	return used;
}

/* Called with the socket's lock. */
static void receive(struct endpoint *ep)
{
	read_descriptor_t descriptor = { .arg.data = ep, .count = 1 };
	bool wants_tx;

	spin_lock_bh(&ep->lock);
	/*
	 * If a Send was held, the engine first processes the data that it has kept. The rest of
	 * the Send may still be in the socket.
	 */
	if (ep->held)
		feed_engine(ep, NULL, 0);
	if (!ep->error)
		tcp_read_sock(ep->socket->sk, &descriptor, take);
	wants_tx = rk_wants_tx(ep->qp);
	spin_unlock_bh(&ep->lock);
	wake_up(&ep->completed);
	if (wants_tx)
		kick(ep);
}

static void data_ready(struct sock *sk)
{
	struct endpoint *ep;

	read_lock_bh(&sk->sk_callback_lock);
	ep = sk->sk_user_data;
	if (ep)
		receive(ep);
	read_unlock_bh(&sk->sk_callback_lock);
}

static void write_space(struct sock *sk)
{
	struct endpoint *ep;

	read_lock_bh(&sk->sk_callback_lock);
	ep = sk->sk_user_data;
	if (ep) {
		ep->write_space(sk);
		kick(ep);
	}
	read_unlock_bh(&sk->sk_callback_lock);
}

static void state_change(struct sock *sk)
{
	struct endpoint *ep;

	read_lock_bh(&sk->sk_callback_lock);
	ep = sk->sk_user_data;
	if (ep) {
		ep->state_change(sk);
		kick(ep);
	}
	read_unlock_bh(&sk->sk_callback_lock);
}

/* ---- sending ---- */

/*
 * Sends until nothing is pending or the socket is full. Only this thread fills the plan and writes
 * its runs.
 */
static int send_due(struct endpoint *ep)
{
	for (;;) {
		struct msghdr message = { .msg_flags = MSG_DONTWAIT | MSG_NOSIGNAL };
		const struct kvec *runs = NULL;
		size_t len = 0;
		int fill, n = 0, i;
		bool unused;

		spin_lock_bh(&ep->lock);
		fill = rk_tx_fill(ep->qp, ep->device);
		if (fill == RK_FILL_MEMORY)
			rk_tx_memory(ep->qp, ep->device);
		else if (fill == RK_FILL_READY)
			n = rk_tx_runs(ep->qp, ep->device, &runs);
		spin_unlock_bh(&ep->lock);
		if (fill == RK_FILL_IDLE)
			return 0;
		if (fill == RK_FILL_MEMORY || fill == RK_FILL_MORE)
			continue;
		if (n < 0)
			return n;
		for (i = 0; i < n; i++)
			len += runs[i].iov_len;
		iov_iter_kvec(&message.msg_iter, ITER_SOURCE, runs, n, len);
		n = sock_sendmsg(ep->socket, &message);
		/* Also after an error, the socket no longer uses the memory of the runs. */
		spin_lock_bh(&ep->lock);
		rk_tx_written(ep->qp, ep->device, max(n, 0));
		unused = rk_take_unused(ep->device);
		if (unused)
			rk_retry_memory(ep->qp);
		spin_unlock_bh(&ep->lock);
		if (unused) {
			lock_sock(ep->socket->sk);
			receive(ep);
			release_sock(ep->socket->sk);
		}
		if (n == -EAGAIN)
			return 0;
		if (n < 0)
			return n;
		wake_up(&ep->completed);
	}
}

/* Reports to the engine that the peer has closed, and then does what rk_qp_wish() returns. */
static void end_stream(struct endpoint *ep)
{
	struct sock *sk = ep->socket->sk;
	bool closed, both_closed;
	int wish;

	lock_sock(sk);
	closed = (sk->sk_shutdown & RCV_SHUTDOWN) && skb_queue_empty(&sk->sk_receive_queue);
	release_sock(sk);
	spin_lock_bh(&ep->lock);
	if (closed && !ep->eof) {
		rk_rx_eof(ep->qp);
		ep->eof = true;
	}
	wish = rk_qp_wish(ep->qp);
	spin_unlock_bh(&ep->lock);
	if (wish == RK_WISH_SHUTDOWN) {
		kernel_sock_shutdown(ep->socket, SHUT_WR);
		spin_lock_bh(&ep->lock);
		rk_qp_shutdown_done(ep->qp);
		wish = rk_qp_wish(ep->qp);
		spin_unlock_bh(&ep->lock);
	}
	spin_lock_bh(&ep->lock);
	both_closed = rk_qp_is_shut_down(ep->qp) && rk_qp_peer_has_closed(ep->qp);
	spin_unlock_bh(&ep->lock);
	if (wish == RK_WISH_LEAVE || wish == RK_WISH_ABORT || both_closed) {
		/* The socket itself is closed later, with the pair. */
		kernel_sock_shutdown(ep->socket, SHUT_WR);
		spin_lock_bh(&ep->lock);
		rk_qp_stream_gone(ep->qp);
		ep->gone = true;
		spin_unlock_bh(&ep->lock);
	}
	wake_up(&ep->completed);
}

static int sender(void *data)
{
	struct endpoint *ep = data;

	while (!kthread_should_stop()) {
		int error;

		wait_event_interruptible(ep->work,
					 READ_ONCE(ep->kicked) || kthread_should_stop());
		WRITE_ONCE(ep->kicked, false);
		if (READ_ONCE(ep->held)) {
			lock_sock(ep->socket->sk);
			receive(ep);
			release_sock(ep->socket->sk);
		}
		error = send_due(ep);
		if (error) {
			spin_lock_bh(&ep->lock);
			ep->error = error;
			spin_unlock_bh(&ep->lock);
			wake_up(&ep->completed);
		}
		end_stream(ep);
	}
	return 0;
}

/* ---- the connection ---- */

static int connect_sockets(struct pair *pair)
{
	struct sockaddr_in address = {
		.sin_family = AF_INET,
		.sin_addr.s_addr = htonl(INADDR_LOOPBACK),
	};
	struct sockaddr *any = (struct sockaddr *)&address;
	struct socket *listener;
	int error;

	error = sock_create_kern(&init_net, AF_INET, SOCK_STREAM, IPPROTO_TCP, &listener);
	if (error)
		return error;
	error = kernel_bind(listener, any, sizeof(address));
	if (!error)
		error = kernel_listen(listener, 1);
	if (!error)
		/* Query the port that the kernel has chosen. */
		error = min(kernel_getsockname(listener, any), 0);
	if (!error)
		error = sock_create_kern(&init_net, AF_INET, SOCK_STREAM, IPPROTO_TCP,
					 &pair->a.socket);
	if (!error)
		error = kernel_connect(pair->a.socket, any, sizeof(address), 0);
	if (!error)
		error = kernel_accept(listener, &pair->b.socket, 0);
	sock_release(listener);
	return error;
}

static int attach(struct endpoint *ep)
{
	struct sock *sk = ep->socket->sk;

	tcp_sock_set_nodelay(sk);
	ep->sender = kthread_run(sender, ep, "iwarp-test-%s", ep->name);
	if (IS_ERR(ep->sender)) {
		int error = PTR_ERR(ep->sender);

		ep->sender = NULL;
		return error;
	}
	write_lock_bh(&sk->sk_callback_lock);
	ep->data_ready = sk->sk_data_ready;
	ep->write_space = sk->sk_write_space;
	ep->state_change = sk->sk_state_change;
	sk->sk_user_data = ep;
	sk->sk_data_ready = data_ready;
	sk->sk_write_space = write_space;
	sk->sk_state_change = state_change;
	write_unlock_bh(&sk->sk_callback_lock);
	return 0;
}

static void detach(struct endpoint *ep)
{
	struct sock *sk;

	if (!ep->socket)
		return;
	sk = ep->socket->sk;
	if (ep->sender) {
		kthread_stop(ep->sender);
		write_lock_bh(&sk->sk_callback_lock);
		sk->sk_data_ready = ep->data_ready;
		sk->sk_write_space = ep->write_space;
		sk->sk_state_change = ep->state_change;
		sk->sk_user_data = NULL;
		write_unlock_bh(&sk->sk_callback_lock);
	}
	sock_release(ep->socket);
	ep->socket = NULL;
}

int over_tcp_open(struct pair *pair)
{
	int error = connect_sockets(pair);

	if (!error)
		error = attach(&pair->a);
	if (!error)
		error = attach(&pair->b);
	return error;
}

void over_tcp_close(struct pair *pair)
{
	detach(&pair->a);
	detach(&pair->b);
}

/* ---- the tests ---- */

/*
 * Waits until `*count` is at least `wanted`. Returns false if the stream fails or PATIENCE expires.
 */
static bool await_count(struct endpoint *ep, const u64 *count, u64 wanted)
{
	wait_event_timeout(ep->completed,
			   READ_ONCE(*count) >= wanted || READ_ONCE(ep->error) ||
			   READ_ONCE(ep->failures),
			   PATIENCE);
	return READ_ONCE(*count) >= wanted && !ep->error && !ep->failures;
}

/* Posts `count` requests, with at most `depth` outstanding, and waits for all completions. */
static int run(struct endpoint *ep, struct endpoint *peer, u32 op, int count, int depth)
{
	int i;

	for (i = 0; i < count; i++) {
		if (i >= depth)
			EXPECT(await_count(ep, &ep->sends, i + 1 - depth));
		EXPECT(!post(ep, op, i, peer));
		kick(ep);
	}
	EXPECT(await_count(ep, &ep->sends, count));
	EXPECT(ep->sends == count && ep->last_send.wr_id == count - 1);
	return 0;
}

/*
 * A Write completes at the sender when TCP has taken its data. When the Send after the Writes
 * completes at the receiver, their data are in place.
 */
int over_tcp_writes(struct pair *pair)
{
	struct endpoint *a = &pair->a, *b = &pair->b;
	struct rk_send last = { .wr_id = 1000, .op = RK_SEND, .flags = RK_SIGNALED };
	int error;

	pattern(a->buffer, BUFFER, 11);
	EXPECT(!post_receive(b, 1));
	error = run(a, b, RK_WRITE, 200, 8);
	if (error)
		return error;
	spin_lock_bh(&a->lock);
	error = rk_post_send(a->qp, &last);
	spin_unlock_bh(&a->lock);
	EXPECT(!error);
	kick(a);
	EXPECT(await_count(b, &b->receives, 1));
	EXPECT(b->in_softirq == 1);
	EXPECT(!memcmp(a->buffer, b->buffer, BUFFER));
	return 0;
}

int over_tcp_reads(struct pair *pair)
{
	struct endpoint *a = &pair->a, *b = &pair->b;
	int error;

	pattern(b->buffer, BUFFER, 12);
	error = run(a, b, RK_READ, 200, 8);
	if (error)
		return error;
	EXPECT(a->in_softirq);
	EXPECT(!memcmp(a->buffer, b->buffer, BUFFER));
	return 0;
}

/* a and b send to each other in turn. */
int over_tcp_ping_pong(struct pair *pair)
{
	struct endpoint *a = &pair->a, *b = &pair->b;
	u64 i;

	for (i = 1; i <= 100; i++) {
		pattern(a->buffer, BUFFER, i);
		EXPECT(!post_receive(b, i));
		EXPECT(!post(a, RK_SEND, i, b));
		kick(a);
		EXPECT(await_count(b, &b->receives, i));
		EXPECT(await_count(a, &a->sends, i));
		EXPECT(b->last_receive.wr_id == i && b->last_receive.byte_len == BUFFER);
		EXPECT(!memcmp(a->buffer, b->buffer, BUFFER));

		pattern(b->buffer, BUFFER, i + 1000);
		EXPECT(!post_receive(a, i));
		EXPECT(!post(b, RK_SEND, i, a));
		kick(b);
		EXPECT(await_count(a, &a->receives, i));
		EXPECT(await_count(b, &b->sends, i));
		EXPECT(!memcmp(a->buffer, b->buffer, BUFFER));
	}
	return 0;
}

/* A Send that finds no receive waits, and delays the Sends after it. */
int over_tcp_held(struct pair *pair)
{
	struct endpoint *a = &pair->a, *b = &pair->b;

	pattern(a->buffer, BUFFER, 13);
	EXPECT(!post(a, RK_SEND, 1, b));
	EXPECT(!post(a, RK_SEND, 2, b));
	kick(a);
	EXPECT(await_count(a, &a->sends, 1));
	wait_event_timeout(b->completed, READ_ONCE(b->held), PATIENCE);
	EXPECT(b->held && !b->receives);
	EXPECT(!post_receive(b, 3));
	kick(b);
	EXPECT(await_count(b, &b->receives, 1));
	EXPECT(!memcmp(a->buffer, b->buffer, BUFFER));
	EXPECT(!post_receive(b, 4));
	kick(b);
	EXPECT(await_count(b, &b->receives, 2));
	EXPECT(await_count(a, &a->sends, 2));
	EXPECT(b->last_receive.wr_id == 4);
	return 0;
}

/*
 * One side posts Writes and closes gracefully: all data arrive, the peer's requests are flushed,
 * and both streams end.
 */
int over_tcp_end(struct pair *pair)
{
	struct endpoint *a = &pair->a, *b = &pair->b;
	int i;

	pattern(a->buffer, BUFFER, 14);
	EXPECT(!post_receive(b, 1));
	for (i = 0; i < 16; i++)
		EXPECT(!post(a, RK_WRITE, i, b));
	spin_lock_bh(&a->lock);
	rk_qp_close(a->qp);
	spin_unlock_bh(&a->lock);
	kick(a);
	wait_event_timeout(a->completed, READ_ONCE(a->gone), PATIENCE);
	wait_event_timeout(b->completed, READ_ONCE(b->gone), PATIENCE);
	EXPECT(a->gone && b->gone && a->eof && b->eof);
	EXPECT(a->sends == 16 && !a->failures && !a->error);
	EXPECT(b->receives == 1 && b->last_receive.wr_id == 1 && b->last_receive.status);
	EXPECT(!b->error && rk_qp_state(b->qp) == RK_STATE_ERROR);
	EXPECT(!memcmp(a->buffer, b->buffer, BUFFER));
	/* A request that is posted after the end is flushed. */
	EXPECT(!post(a, RK_SEND, 17, b));
	EXPECT(a->sends == 17 && a->last_send.wr_id == 17 && a->last_send.status);
	return 0;
}
