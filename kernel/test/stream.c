// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * Tests over a TCP connection of the kernel. Received data are processed in softirq; a thread for
 * each end sends.
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

static void kick(struct end *end)
{
	WRITE_ONCE(end->kicked, true);
	wake_up(&end->work);
}

/* ---- receiving ---- */

/* Offers bytes to the engine. Returns how many it has taken. */
static size_t offer(struct end *end, const u8 *octets, size_t len)
{
	size_t taken;
	int status = rk_rx_input(end->qp, end->device, octets, len, &taken);

	if (status < 0)
		end->error = status;
	end->held = status == RK_RX_HELD || status == RK_RX_WAITS;
	return taken;
}

/*
 * Offers a part of a packet in place. Called by tcp_read_sock() with the socket and the queue pair
 * locked.
 */
static int take(read_descriptor_t *descriptor, struct sk_buff *skb, unsigned int offset, size_t len)
{
	struct end *end = descriptor->arg.data;
	struct skb_seq_state state;
	unsigned int used = 0, part;
	const u8 *octets;

	skb_prepare_seq_read(skb, offset, offset + len, &state);
	do {
		part = skb_seq_read(used, &octets, &state);
		if (part)
			used += offer(end, octets, part);
	} while (part && !end->held && !end->error);
	skb_abort_seq_read(&state);
	return used;
}

/* Called with the socket's lock. */
static void receive(struct end *end)
{
	read_descriptor_t descriptor = { .arg.data = end, .count = 1 };
	bool wants;

	spin_lock_bh(&end->lock);
	/*
	 * Data that the queue pair has kept come first. A held Send may also still be in the
	 * socket.
	 */
	if (end->held)
		offer(end, NULL, 0);
	if (!end->error)
		tcp_read_sock(end->socket->sk, &descriptor, take);
	wants = rk_wants_tx(end->qp);
	spin_unlock_bh(&end->lock);
	wake_up(&end->completed);
	if (wants)
		kick(end);
}

static void data_ready(struct sock *sk)
{
	struct end *end;

	read_lock_bh(&sk->sk_callback_lock);
	end = sk->sk_user_data;
	if (end)
		receive(end);
	read_unlock_bh(&sk->sk_callback_lock);
}

static void write_space(struct sock *sk)
{
	struct end *end;

	read_lock_bh(&sk->sk_callback_lock);
	end = sk->sk_user_data;
	if (end) {
		end->write_space(sk);
		kick(end);
	}
	read_unlock_bh(&sk->sk_callback_lock);
}

static void state_change(struct sock *sk)
{
	struct end *end;

	read_lock_bh(&sk->sk_callback_lock);
	end = sk->sk_user_data;
	if (end) {
		end->state_change(sk);
		kick(end);
	}
	read_unlock_bh(&sk->sk_callback_lock);
}

/* ---- sending ---- */

/*
 * Sends everything that is due, until the socket is full. Only this thread fills and writes the
 * plan.
 */
static int send_due(struct end *end)
{
	for (;;) {
		struct msghdr message = { .msg_flags = MSG_DONTWAIT | MSG_NOSIGNAL };
		const struct kvec *runs = NULL;
		size_t len = 0;
		int fill, n = 0, i;
		bool unused;

		spin_lock_bh(&end->lock);
		fill = rk_tx_fill(end->qp, end->device);
		if (fill == RK_FILL_MEMORY)
			rk_tx_memory(end->qp, end->device);
		else if (fill == RK_FILL_READY)
			n = rk_tx_runs(end->qp, end->device, &runs);
		spin_unlock_bh(&end->lock);
		if (fill == RK_FILL_IDLE)
			return 0;
		if (fill == RK_FILL_MEMORY || fill == RK_FILL_MORE)
			continue;
		if (n < 0)
			return n;
		for (i = 0; i < n; i++)
			len += runs[i].iov_len;
		iov_iter_kvec(&message.msg_iter, ITER_SOURCE, runs, n, len);
		n = sock_sendmsg(end->socket, &message);
		/* In any case, the memory of the runs is no longer in use. */
		spin_lock_bh(&end->lock);
		rk_tx_written(end->qp, end->device, max(n, 0));
		unused = rk_take_unused(end->device);
		if (unused)
			rk_retry_memory(end->qp);
		spin_unlock_bh(&end->lock);
		if (unused) {
			lock_sock(end->socket->sk);
			receive(end);
			release_sock(end->socket->sk);
		}
		if (n == -EAGAIN)
			return 0;
		if (n < 0)
			return n;
		wake_up(&end->completed);
	}
}

/* Reports the peer's end to the queue pair, and does to the stream what the queue pair wants. */
static void end_stream(struct end *end)
{
	struct sock *sk = end->socket->sk;
	bool closed, both_closed;
	int wish;

	lock_sock(sk);
	closed = (sk->sk_shutdown & RCV_SHUTDOWN) && skb_queue_empty(&sk->sk_receive_queue);
	release_sock(sk);
	spin_lock_bh(&end->lock);
	if (closed && !end->eof) {
		rk_rx_eof(end->qp);
		end->eof = true;
	}
	wish = rk_qp_wish(end->qp);
	spin_unlock_bh(&end->lock);
	if (wish == RK_WISH_SHUTDOWN) {
		kernel_sock_shutdown(end->socket, SHUT_WR);
		spin_lock_bh(&end->lock);
		rk_qp_shutdown_done(end->qp);
		wish = rk_qp_wish(end->qp);
		spin_unlock_bh(&end->lock);
	}
	spin_lock_bh(&end->lock);
	both_closed = rk_qp_is_shut_down(end->qp) && rk_qp_peer_has_closed(end->qp);
	spin_unlock_bh(&end->lock);
	if (wish == RK_WISH_LEAVE || wish == RK_WISH_ABORT || both_closed) {
		/* The socket is closed with the pair. */
		kernel_sock_shutdown(end->socket, SHUT_WR);
		spin_lock_bh(&end->lock);
		rk_qp_stream_gone(end->qp);
		end->gone = true;
		spin_unlock_bh(&end->lock);
	}
	wake_up(&end->completed);
}

static int sender(void *data)
{
	struct end *end = data;

	while (!kthread_should_stop()) {
		int error;

		wait_event_interruptible(end->work,
					 READ_ONCE(end->kicked) || kthread_should_stop());
		WRITE_ONCE(end->kicked, false);
		if (READ_ONCE(end->held)) {
			lock_sock(end->socket->sk);
			receive(end);
			release_sock(end->socket->sk);
		}
		error = send_due(end);
		if (error) {
			spin_lock_bh(&end->lock);
			end->error = error;
			spin_unlock_bh(&end->lock);
			wake_up(&end->completed);
		}
		end_stream(end);
	}
	return 0;
}

/* ---- the connection ---- */

static int connected(struct pair *pair)
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
		/* The port that the kernel has chosen. */
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

static int attach(struct end *end)
{
	struct sock *sk = end->socket->sk;

	tcp_sock_set_nodelay(sk);
	end->sender = kthread_run(sender, end, "iwarp-test-%s", end->name);
	if (IS_ERR(end->sender)) {
		int error = PTR_ERR(end->sender);

		end->sender = NULL;
		return error;
	}
	write_lock_bh(&sk->sk_callback_lock);
	end->data_ready = sk->sk_data_ready;
	end->write_space = sk->sk_write_space;
	end->state_change = sk->sk_state_change;
	sk->sk_user_data = end;
	sk->sk_data_ready = data_ready;
	sk->sk_write_space = write_space;
	sk->sk_state_change = state_change;
	write_unlock_bh(&sk->sk_callback_lock);
	return 0;
}

static void detach(struct end *end)
{
	struct sock *sk;

	if (!end->socket)
		return;
	sk = end->socket->sk;
	if (end->sender) {
		kthread_stop(end->sender);
		write_lock_bh(&sk->sk_callback_lock);
		sk->sk_data_ready = end->data_ready;
		sk->sk_write_space = end->write_space;
		sk->sk_state_change = end->state_change;
		sk->sk_user_data = NULL;
		write_unlock_bh(&sk->sk_callback_lock);
	}
	sock_release(end->socket);
	end->socket = NULL;
}

int over_tcp_open(struct pair *pair)
{
	int error = connected(pair);

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
 * Waits for a number of completions. Returns false if the stream fails or nothing happens for long.
 */
static bool reached(struct end *end, const u64 *count, u64 wanted)
{
	wait_event_timeout(end->completed,
			   READ_ONCE(*count) >= wanted || READ_ONCE(end->error) ||
			   READ_ONCE(end->failures),
			   PATIENCE);
	return READ_ONCE(*count) >= wanted && !end->error && !end->failures;
}

/* Posts `count` requests, at most `depth` of them outstanding, and waits for their completions. */
static int run(struct end *end, struct end *peer, u32 op, int count, int depth)
{
	int i;

	for (i = 0; i < count; i++) {
		if (i >= depth)
			EXPECT(reached(end, &end->sends, i + 1 - depth));
		EXPECT(!post(end, op, i, peer));
		kick(end);
	}
	EXPECT(reached(end, &end->sends, count));
	EXPECT(end->sends == count && end->last_send.wr_id == count - 1);
	return 0;
}

/* A Write completes when TCP has taken it. A Send after it arrives when the Write is placed. */
int over_tcp_writes(struct pair *pair)
{
	struct end *a = &pair->a, *b = &pair->b;
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
	EXPECT(reached(b, &b->receives, 1));
	EXPECT(b->in_softirq == 1);
	EXPECT(!memcmp(a->buffer, b->buffer, BUFFER));
	return 0;
}

int over_tcp_reads(struct pair *pair)
{
	struct end *a = &pair->a, *b = &pair->b;
	int error;

	pattern(b->buffer, BUFFER, 12);
	error = run(a, b, RK_READ, 200, 8);
	if (error)
		return error;
	EXPECT(a->in_softirq);
	EXPECT(!memcmp(a->buffer, b->buffer, BUFFER));
	return 0;
}

/* Each end answers the other's Send with its own. */
int over_tcp_ping_pong(struct pair *pair)
{
	struct end *a = &pair->a, *b = &pair->b;
	u64 i;

	for (i = 1; i <= 100; i++) {
		pattern(a->buffer, BUFFER, i);
		EXPECT(!post_receive(b, i));
		EXPECT(!post(a, RK_SEND, i, b));
		kick(a);
		EXPECT(reached(b, &b->receives, i));
		EXPECT(reached(a, &a->sends, i));
		EXPECT(b->last_receive.wr_id == i && b->last_receive.byte_len == BUFFER);
		EXPECT(!memcmp(a->buffer, b->buffer, BUFFER));

		pattern(b->buffer, BUFFER, i + 1000);
		EXPECT(!post_receive(a, i));
		EXPECT(!post(b, RK_SEND, i, a));
		kick(b);
		EXPECT(reached(a, &a->receives, i));
		EXPECT(reached(b, &b->sends, i));
		EXPECT(!memcmp(a->buffer, b->buffer, BUFFER));
	}
	return 0;
}

/* A Send without a receive waits, and so does everything behind it. */
int over_tcp_held(struct pair *pair)
{
	struct end *a = &pair->a, *b = &pair->b;

	pattern(a->buffer, BUFFER, 13);
	EXPECT(!post(a, RK_SEND, 1, b));
	EXPECT(!post(a, RK_SEND, 2, b));
	kick(a);
	EXPECT(reached(a, &a->sends, 1));
	wait_event_timeout(b->completed, READ_ONCE(b->held), PATIENCE);
	EXPECT(b->held && !b->receives);
	EXPECT(!post_receive(b, 3));
	kick(b);
	EXPECT(reached(b, &b->receives, 1));
	EXPECT(!memcmp(a->buffer, b->buffer, BUFFER));
	EXPECT(!post_receive(b, 4));
	kick(b);
	EXPECT(reached(b, &b->receives, 2));
	EXPECT(reached(a, &a->sends, 2));
	EXPECT(b->last_receive.wr_id == 4);
	return 0;
}

/*
 * Writes, then a graceful end: everything arrives, the peer's requests are flushed, and both
 * streams end.
 */
int over_tcp_end(struct pair *pair)
{
	struct end *a = &pair->a, *b = &pair->b;
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
	/* A request posted too late is flushed. */
	EXPECT(!post(a, RK_SEND, 17, b));
	EXPECT(a->sends == 17 && a->last_send.wr_id == 17 && a->last_send.status);
	return 0;
}
