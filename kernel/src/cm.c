// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * Connections for iw_cm: connect, accept and reject; listen.c contains the listeners. The Rust
 * library (rk_mpa_*) keeps the state of MPA start-up, with its frames and time limits; the code
 * here moves the bytes and keeps a timer.
 *
 * An outgoing TCP connection is started in the program's call (rnic_connect). All further steps, at
 * both ends, are done in turns: work items of one ordered workqueue, which never wait for a peer. A
 * turn is queued when data arrive on the socket or a time limit expires, so turns run in the order
 * of arrival. Programs expect connection requests in the order in which the peers' TCP connections
 * arrived.
 *
 * Until iw_cm is notified of a connection, only the connection's own turns use it. After that, a
 * responder's connection belongs to the identifier that iw_cm has created, which accepts or rejects
 * it once.
 */
#include <linux/slab.h>
#include <net/tcp.h>

#include "cm.h"

/* Bytes of private data that iw_cm passes on. */
#define MAX_PRIVATE_DATA 255

size_t rnic_address_size(const struct sockaddr_storage *address)
{
	if (address->ss_family == AF_INET)
		return sizeof(struct sockaddr_in);
	return sizeof(struct sockaddr_in6);
}

struct rk_mpa_params rnic_mpa_params(u32 ird, u32 ord)
{
	return (struct rk_mpa_params){
		.revision = rnic_mpa_revision,
		.crc = rnic_mpa_crc,
		.markers = rnic_mpa_markers,
		.peer_to_peer = rnic_peer_to_peer,
		.ird = min_t(u32, ird, RNIC_MAX_READS),
		.ord = min_t(u32, ord, RNIC_MAX_READS),
		.max_ird = RNIC_MAX_READS,
		.max_ord = RNIC_MAX_READS,
	};
}

/* ---- turns ---- */

static void queue_turn(struct rnic_connection *connection)
{
	queue_work(rnic_cm_wq, &connection->work);
}

static void timer_expired(struct timer_list *timer)
{
	queue_turn(container_of(timer, struct rnic_connection, timer));
}

static void socket_event(struct sock *sk)
{
	struct rnic_connection *connection;

	read_lock_bh(&sk->sk_callback_lock);
	connection = sk->sk_user_data;
	if (connection)
		queue_turn(connection);
	read_unlock_bh(&sk->sk_callback_lock);
}

struct rnic_connection *rnic_connection_new(struct rk_mpa *mpa, work_func_t turn)
{
	struct rnic_connection *connection = mpa ? kzalloc(sizeof(*connection), RNIC_GFP) : NULL;

	if (!connection) {
		rk_mpa_free(mpa);
		return NULL;
	}
	connection->mpa = mpa;
	INIT_WORK(&connection->work, turn);
	timer_setup(&connection->timer, timer_expired, 0);
	return connection;
}

/* Frees a connection that is not watched, and its socket if it still owns one. */
void rnic_connection_free(struct rnic_connection *connection)
{
	if (connection->socket)
		rnic_close_socket(connection->socket, connection->reset);
	rk_mpa_free(connection->mpa);
	kfree(connection);
}

/*
 * Queues a turn for each event of the socket and of the timer from now on. No callback reports
 * earlier events, so this queues a turn immediately if data have arrived or the socket has left
 * `expected_state`. The timer is set while the socket is locked: a turn may be the last one and
 * free the connection, and it needs that lock.
 */
void rnic_watch(struct rnic_connection *connection, int expected_state)
{
	struct sock *sk = connection->socket->sk;

	lock_sock(sk);
	write_lock_bh(&sk->sk_callback_lock);
	connection->data_ready = sk->sk_data_ready;
	connection->state_change = sk->sk_state_change;
	sk->sk_user_data = connection;
	sk->sk_data_ready = socket_event;
	sk->sk_state_change = socket_event;
	write_unlock_bh(&sk->sk_callback_lock);
	rnic_set_timer(connection);
	if (sk->sk_state != expected_state || !skb_queue_empty(&sk->sk_receive_queue))
		queue_turn(connection);
	release_sock(sk);
}

/* Restores the socket's callbacks and stops further turns. Called in the last turn. */
void rnic_unwatch(struct rnic_connection *connection)
{
	struct sock *sk;

	if (!connection->data_ready)
		return;
	sk = connection->socket->sk;
	write_lock_bh(&sk->sk_callback_lock);
	sk->sk_data_ready = connection->data_ready;
	sk->sk_state_change = connection->state_change;
	sk->sk_user_data = NULL;
	write_unlock_bh(&sk->sk_callback_lock);
	connection->data_ready = NULL;
	timer_delete_sync(&connection->timer);
	/* Another turn may be queued, but none is running except for this one. */
	cancel_work(&connection->work);
}

void rnic_set_timer(struct rnic_connection *connection)
{
	u64 at = rk_mpa_poll_at(connection->mpa), now = ktime_get_ns();

	if (at == U64_MAX)
		return;
	/* A turn that runs early sets the timer again. */
	mod_timer(&connection->timer, jiffies + 1 + nsecs_to_jiffies(at > now ? at - now : 0));
}

/*
 * Passes on the result of a step. If it is -EAGAIN (more turns are needed), sets the timer for the
 * next one; if a time limit has expired, returns -ETIMEDOUT instead.
 */
int rnic_check_time_limit(struct rnic_connection *connection, int result)
{
	if (result != -EAGAIN)
		return result;
	result = rk_mpa_on_time(connection->mpa, ktime_get_ns());
	if (result)
		return result;
	rnic_set_timer(connection);
	return -EAGAIN;
}

/* ---- frames ---- */

/* Sends a frame. The send buffer of a new connection is empty, so TCP takes the whole frame. */
static int send_frame(struct socket *socket, const u8 *frame, size_t octets)
{
	struct msghdr message = { .msg_flags = MSG_DONTWAIT | MSG_NOSIGNAL };
	struct kvec run = { .iov_base = (void *)frame, .iov_len = octets };
	int sent = kernel_sendmsg(socket, &message, &run, 1, octets);

	if (sent >= 0 || sent == -EAGAIN)
		return sent == octets ? 0 : -ECONNABORTED;
	return sent;
}

/*
 * Reads the bytes of the peer's frame that have arrived, but no byte after the frame. Returns
 * -EAGAIN if the frame is incomplete.
 */
int rnic_read_frame(struct rnic_connection *connection, struct rk_mpa_peer *peer)
{
	u8 part[64];

	for (;;) {
		struct msghdr message = {};
		struct kvec run = { .iov_base = part };
		int missing = rk_mpa_missing(connection->mpa);
		int received, result;

		if (missing <= 0)
			return missing ? missing : -EPROTO;
		run.iov_len = min_t(size_t, missing, sizeof(part));
		received = kernel_recvmsg(connection->socket, &message, &run, 1, run.iov_len,
					  MSG_DONTWAIT);
		if (received <= 0)
			return received ? received : -ECONNRESET;
		result = rk_mpa_push(connection->mpa, part, received, peer);
		if (result != -EAGAIN)
			return result;
	}
}

/*
 * Converts an IPv4-mapped IPv6 address to the IPv4 address, because rdma_cm searches for the
 * network device with this address. A listener on the IPv6 wildcard accepts IPv4 connections, too,
 * unless its owner has set `afonly`.
 */
static void unmap_v4(struct sockaddr_storage *address)
{
	const struct sockaddr_in6 *in6 = (const struct sockaddr_in6 *)address;
	struct sockaddr_in in = {
		.sin_family = AF_INET,
		.sin_port = in6->sin6_port,
		.sin_addr.s_addr = in6->sin6_addr.s6_addr32[3],
	};

	if (address->ss_family == AF_INET6 && ipv6_addr_v4mapped(&in6->sin6_addr))
		memcpy(address, &in, sizeof(in));
}

static void set_addresses(struct socket *socket, struct iw_cm_event *event)
{
	kernel_getsockname(socket, (struct sockaddr *)&event->local_addr);
	kernel_getpeername(socket, (struct sockaddr *)&event->remote_addr);
	unmap_v4(&event->local_addr);
	unmap_v4(&event->remote_addr);
}

void rnic_describe_peer(const struct rnic_connection *connection, const struct rk_mpa_peer *peer,
			struct iw_cm_event *event)
{
	set_addresses(connection->socket, event);
	event->private_data = (void *)peer->private_data;
	event->private_data_len = min_t(u32, peer->private_data_len, MAX_PRIVATE_DATA);
}

/*
 * Starts the queue pair on the connection, and attaches the socket to it. Sends a responder's reply
 * when the queue pair is ready for the peer's first bytes. Called with the queue pair's mutex.
 */
static int begin_stream(struct rnic_qp *qp, struct rnic_connection *connection, struct iw_cm_id *id,
			const u8 *reply, size_t octets)
{
	struct sock *sk = connection->socket->sk;
	struct msghdr message = { .msg_flags = MSG_DONTWAIT | MSG_NOSIGNAL };
	struct kvec run = { .iov_base = (void *)reply, .iov_len = octets };
	int result;

	if (qp->socket)
		return -EISCONN;
	tcp_sock_set_nodelay(sk);
	lock_sock(sk);
	spin_lock_bh(&qp->lock);
	result = rk_qp_begin(qp->engine, connection->mpa, tcp_sk(sk)->mss_cache, ktime_get_ns());
	if (!result)
		qp->stream_state = RNIC_STREAM_UP;
	spin_unlock_bh(&qp->lock);
	if (!result && octets) {
		iov_iter_kvec(&message.msg_iter, ITER_SOURCE, &run, 1, octets);
		/*
		 * The send buffer is empty, so TCP takes the whole reply. While this function holds
		 * the socket's lock, TCP queues data from the peer in the backlog, so none is
		 * handled before the stream is attached.
		 */
		result = tcp_sendmsg_locked(sk, &message, octets);
		result = result == octets ? 0 : -ECONNABORTED;
		if (result) {
			spin_lock_bh(&qp->lock);
			/* Report the error, then that there is no stream any more. */
			rk_stream_failed(qp->engine);
			rk_qp_stream_gone(qp->engine);
			qp->stream_state = RNIC_STREAM_NONE;
			spin_unlock_bh(&qp->lock);
		}
	}
	if (!result) {
		rnic_stream_attach(qp, connection->socket, id);
		connection->socket = NULL;
	}
	release_sock(sk);
	return result;
}

/* ---- the initiator ---- */

/*
 * Creates a socket and starts to connect from the address `local`. A turn is queued when TCP has
 * connected or failed.
 */
static int start_connect(struct rnic_connection *connection, struct sockaddr_storage *local)
{
	struct iw_cm_id *id = connection->id;
	int result = rnic_create_socket(id->device, local, &connection->socket);

	if (result)
		return result;
	sock_set_reuseaddr(connection->socket->sk);
	result = kernel_bind(connection->socket, (rnic_sockaddr *)local,
			     rnic_address_size(local));
	if (result)
		return result;
	result = kernel_connect(connection->socket, (rnic_sockaddr *)&id->m_remote_addr,
				rnic_address_size(&id->m_remote_addr), O_NONBLOCK);
	if (result != -EINPROGRESS)
		return result;
	rk_mpa_connecting(connection->mpa, ktime_get_ns());
	rnic_watch(connection, TCP_SYN_SENT);
	return 0;
}

/* Connects again with a new socket, from a port that the system chooses. */
static int start_from_new_port(struct rnic_connection *connection)
{
	struct sockaddr_storage local = connection->id->m_local_addr;

	rnic_close_socket(connection->socket, false);
	connection->socket = NULL;
	/* The port is at the same offset in both families. */
	((struct sockaddr_in *)&local)->sin_port = 0;
	return start_connect(connection, &local);
}

/*
 * Returns true if TCP cannot use the local port, and another port may be used instead. rdma_cm
 * chooses ports without asking TCP, so another socket may use the port. And rtrs uses one local
 * port for all connections of a session, which go to the same peer, so their 4-tuples would be
 * equal. A port outside of the ephemeral range was requested by the client, so it must not be
 * replaced.
 */
static bool may_change_port(const struct iw_cm_id *id, int result)
{
	struct net *net = to_device(id->device)->net;
	/* The port is at the same offset in both families. */
	int low, high, port = ntohs(((const struct sockaddr_in *)&id->m_local_addr)->sin_port);

	if (result != -EADDRINUSE && result != -EADDRNOTAVAIL)
		return false;
	inet_get_local_port_range(net, &low, &high);
	return port >= low && port <= high;
}

/*
 * Connects again, from another port, after the peer has closed instead of replying: it may not
 * support the MPA revision.
 */
static int connect_again(struct rnic_connection *connection)
{
	int result = rk_mpa_retry(connection->mpa);

	if (result)
		return result;
	rnic_unwatch(connection);
	connection->requested = false;
	return start_from_new_port(connection);
}

/* Sends the request once the socket is connected. Returns -EAGAIN until then. */
static int send_request(struct rnic_connection *connection)
{
	struct iw_cm_id *id = connection->id;
	const u8 *request;
	size_t octets;
	/* The second call returns the result of the first. */
	int result = kernel_connect(connection->socket, (rnic_sockaddr *)&id->m_remote_addr,
				    rnic_address_size(&id->m_remote_addr), O_NONBLOCK);

	if (result)
		return result == -EALREADY ? -EAGAIN : result;
	octets = rk_mpa_request(connection->mpa, &request);
	result = send_frame(connection->socket, request, octets);
	if (result)
		return result;
	connection->requested = true;
	rk_mpa_request_sent(connection->mpa, ktime_get_ns());
	return 0;
}

static int initiator_step(struct rnic_connection *connection, struct rk_mpa_peer *peer)
{
	int result = connection->requested ? 0 : send_request(connection);

	if (!result)
		result = rnic_read_frame(connection, peer);
	if (result == -ECONNRESET || result == -EPIPE) {
		result = connect_again(connection);
		if (!result)
			result = -EAGAIN;
	}
	return rnic_check_time_limit(connection, result);
}

static void connect_turn(struct work_struct *work)
{
	struct rnic_connection *connection = container_of(work, struct rnic_connection, work);
	struct iw_cm_event event = { .event = IW_CM_EVENT_CONNECT_REPLY };
	struct iw_cm_id *id = connection->id;
	struct rnic_qp *qp = connection->qp;
	struct rk_mpa_peer peer = {};

	event.status = initiator_step(connection, &peer);
	if (event.status == -EAGAIN)
		return;
	rnic_unwatch(connection);
	event.local_addr = id->local_addr;
	event.remote_addr = id->remote_addr;
	if ((event.status == -ECONNREFUSED && connection->socket) || !event.status)
		rnic_describe_peer(connection, &peer, &event);
	event.ird = min_t(u16, peer.ord, U8_MAX);
	event.ord = min_t(u16, peer.ird, U8_MAX);
	/* Under the mutex, the end of the stream cannot be reported before its beginning. */
	mutex_lock(&qp->mutex);
	if (!event.status)
		event.status = begin_stream(qp, connection, id, NULL, 0);
	id->event_handler(id, &event);
	mutex_unlock(&qp->mutex);
	/*
	 * Sends what is due (the RTR), and processes data that arrived after the reply, before the
	 * stream was attached.
	 */
	rnic_stream_kick(qp);
	id->rem_ref(id);
	rnic_qp_put(&qp->base);
	rnic_connection_free(connection);
}

int rnic_connect(struct iw_cm_id *id, struct iw_cm_conn_param *param)
{
	struct rk_mpa_params params = rnic_mpa_params(param->ird, param->ord);
	struct rnic_qp *qp = rnic_find_qp(id->device, param->qpn);
	struct rnic_connection *connection;
	int result;

	if (!qp || id->m_remote_addr.ss_family != id->m_local_addr.ss_family)
		return -EINVAL;
	connection = rnic_connection_new(rk_mpa_new(true, &params, param->private_data,
						    param->private_data_len, ktime_get_ns()),
					 connect_turn);
	if (!connection)
		return -ENOMEM;
	connection->id = id;
	connection->qp = qp;
	/* The first turn may run immediately, and may be the last. */
	rnic_qp_get(&qp->base);
	id->add_ref(id);
	result = start_connect(connection, &id->m_local_addr);
	if (may_change_port(id, result))
		result = start_from_new_port(connection);
	if (result) {
		id->rem_ref(id);
		rnic_qp_put(&qp->base);
		rnic_connection_free(connection);
	}
	return result;
}

/* ---- the responder's program ---- */

int rnic_accept(struct iw_cm_id *id, struct iw_cm_conn_param *param)
{
	struct rnic_connection *connection = id->provider_data;
	struct iw_cm_event event = { .event = IW_CM_EVENT_ESTABLISHED };
	struct rnic_qp *qp = rnic_find_qp(id->device, param->qpn);
	const u8 *reply;
	int result = -EINVAL;

	id->provider_data = NULL;
	if (!qp)
		goto free;
	result = rk_mpa_accept(connection->mpa, min_t(u32, param->ird, RNIC_MAX_READS),
			       min_t(u32, param->ord, RNIC_MAX_READS), param->private_data,
			       param->private_data_len, &reply);
	if (result < 0)
		goto free;
	set_addresses(connection->socket, &event);
	mutex_lock(&qp->mutex);
	result = begin_stream(qp, connection, id, reply, result);
	if (!result)
		id->event_handler(id, &event);
	mutex_unlock(&qp->mutex);
	if (!result)
		rnic_stream_kick(qp);
free:
	rnic_connection_free(connection);
	return result;
}

int rnic_reject(struct iw_cm_id *id, const void *private_data, u8 octets)
{
	struct rnic_connection *connection = id->provider_data;
	const u8 *reply;
	int result;

	id->provider_data = NULL;
	result = rk_mpa_reject(connection->mpa, private_data, octets, &reply);
	if (result > 0)
		result = send_frame(connection->socket, reply, result);
	rnic_connection_free(connection);
	return result;
}
