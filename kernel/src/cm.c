// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * Connections for iw_cm: who connects, listens, accepts and rejects. The frames of MPA start-up are made and read by the engine (rk_mpa_*);
 * here their octets are moved, by works that may wait.
 *
 * A connection belongs to its work until iw_cm has been told of it. A responder's then belongs to the identifier that iw_cm has made,
 * which accepts or rejects it, once.
 */
#include <linux/slab.h>
#include <net/sock.h>
#include <net/tcp.h>
#include <rdma/iw_cm.h>

#include "rnic.h"

/* How long the peer may take for TCP's connection, and for a frame. */
#define PATIENCE (10 * HZ)
/* Octets of private data that iw_cm passes on. */
#define MAX_PRIVATE_DATA 255
/* Connections whose request has not come yet, for one listener. */
#define MAX_HALF_OPEN 128

struct listener {
	struct iw_cm_id *id;
	struct socket *socket;
	void (*data_ready)(struct sock *sk);
	struct work_struct work;
	/* Guards the list of connections whose request has not come yet. */
	struct mutex lock;
	struct list_head half_open;
	unsigned int count;
	bool closing;
	wait_queue_head_t changed;
};

struct connection {
	struct work_struct work;
	struct iw_cm_id *id;		/* of an initiator */
	struct rnic_qp *qp;		/* of an initiator */
	struct listener *listener;	/* of a responder, until iw_cm knows of it */
	struct list_head entry;
	struct socket *socket;
	struct rk_mpa *mpa;
};

static size_t address_size(const struct sockaddr_storage *address)
{
	return address->ss_family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
}

static struct rk_mpa_params parameters(u32 ird, u32 ord)
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

static void free_connection(struct connection *connection)
{
	if (connection->socket)
		sock_release(connection->socket);
	rk_mpa_free(connection->mpa);
	kfree(connection);
}

/* A socket in the network namespace of the device, for the family of an address. */
static int make_socket(struct ib_device *base, const struct sockaddr_storage *address,
		       struct socket **socket)
{
	struct net *net = dev_net(to_device(base)->netdev);
	int result = sock_create_kern(net, address->ss_family, SOCK_STREAM, IPPROTO_TCP, socket);

	if (result)
		return result;
	(*socket)->sk->sk_rcvtimeo = PATIENCE;
	(*socket)->sk->sk_sndtimeo = PATIENCE;
	return 0;
}

/* Sends a frame in one piece. */
static int send_frame(struct socket *socket, const u8 *frame, size_t octets)
{
	struct msghdr message = { .msg_flags = MSG_NOSIGNAL };
	struct kvec run = { .iov_base = (void *)frame, .iov_len = octets };
	int sent = kernel_sendmsg(socket, &message, &run, 1, octets);

	return sent < 0 ? sent : sent == octets ? 0 : -ECONNABORTED;
}

/* Reads the peer's frame, and nothing behind it, and checks it. */
static int read_frame(struct connection *connection, struct rk_mpa_peer *peer)
{
	unsigned long end = jiffies + PATIENCE;
	u8 part[64];

	for (;;) {
		long left = end - jiffies;
		struct msghdr message = {};
		struct kvec run = { .iov_base = part };
		int count = rk_mpa_missing(connection->mpa);

		if (!count)
			return rk_mpa_check(connection->mpa, peer);
		if (count < 0)
			return count;
		if (left <= 0)
			return -ETIMEDOUT;
		/* All of the frame has this time, so that one octet now and then does not keep us. */
		connection->socket->sk->sk_rcvtimeo = left;
		run.iov_len = min_t(size_t, count, sizeof(part));
		count = kernel_recvmsg(connection->socket, &message, &run, 1, run.iov_len, 0);
		if (count <= 0)
			return count == -EAGAIN ? -ETIMEDOUT : count ? count : -ECONNRESET;
		count = rk_mpa_push(connection->mpa, part, count);
		if (count)
			return count;
	}
}

static void addresses(struct socket *socket, struct iw_cm_event *event)
{
	kernel_getsockname(socket, (struct sockaddr *)&event->local_addr);
	kernel_getpeername(socket, (struct sockaddr *)&event->remote_addr);
}

/*
 * Puts the queue pair into operation on the connection, which it takes over. A responder's reply goes out when everything is in place that
 * the peer's first octets need. Called with the queue pair's mutex.
 */
static int begin(struct rnic_qp *qp, struct connection *connection, struct iw_cm_id *id,
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
	qp->given_up = false;
	result = rk_qp_begin(qp->engine, connection->mpa, tcp_sk(sk)->mss_cache, ktime_get_ns());
	spin_unlock_bh(&qp->lock);
	if (!result && octets) {
		iov_iter_kvec(&message.msg_iter, ITER_SOURCE, &run, 1, octets);
		/* A fresh connection has room for it. The socket's lock keeps the peer's answer back. */
		result = tcp_sendmsg_locked(sk, &message, octets);
		result = result == octets ? 0 : -ECONNABORTED;
		if (result) {
			spin_lock_bh(&qp->lock);
			rk_stream_failed(qp->engine);
			rk_qp_stream_gone(qp->engine);
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

/* Connects from this address, and sends the request. */
static int send_request(struct connection *connection, struct sockaddr_storage *local)
{
	struct iw_cm_id *id = connection->id;
	const u8 *request;
	size_t octets;
	int result;

	sock_set_reuseaddr(connection->socket->sk);
	result = kernel_bind(connection->socket, (struct sockaddr *)local, address_size(local));
	if (result)
		return result;
	result = kernel_connect(connection->socket, (struct sockaddr *)&id->m_remote_addr,
				address_size(&id->m_remote_addr), 0);
	if (result)
		return result;
	octets = rk_mpa_request(connection->mpa, &request);
	return send_frame(connection->socket, request, octets);
}

/* Connects once more, from another port, if the peer may only have disliked the revision. */
static int try_again(struct connection *connection)
{
	struct sockaddr_storage local = connection->id->m_local_addr;
	int result = rk_mpa_retry(connection->mpa);

	if (result)
		return result;
	sock_release(connection->socket);
	connection->socket = NULL;
	/* The port has the same place in both families. */
	((struct sockaddr_in *)&local)->sin_port = 0;
	result = make_socket(connection->id->device, &local, &connection->socket);
	if (result) {
		connection->socket = NULL;
		return result;
	}
	return send_request(connection, &local);
}

static int exchange(struct connection *connection, struct iw_cm_event *event)
{
	struct rk_mpa_peer peer = {};
	int result = send_request(connection, &connection->id->m_local_addr);

	if (!result)
		result = read_frame(connection, &peer);
	if (result == -ECONNRESET || result == -EPIPE) {
		result = try_again(connection);
		if (!result)
			result = read_frame(connection, &peer);
	}
	if (result == -ECONNREFUSED || !result)
		addresses(connection->socket, event);
	event->private_data = (void *)peer.private_data;
	event->private_data_len = min_t(u32, peer.private_data_len, MAX_PRIVATE_DATA);
	event->ird = min_t(u16, peer.ord, U8_MAX);
	event->ord = min_t(u16, peer.ird, U8_MAX);
	return result;
}

static void connect_work(struct work_struct *work)
{
	struct connection *connection = container_of(work, struct connection, work);
	struct iw_cm_event event = { .event = IW_CM_EVENT_CONNECT_REPLY };
	struct iw_cm_id *id = connection->id;
	struct rnic_qp *qp = connection->qp;

	event.local_addr = id->local_addr;
	event.remote_addr = id->remote_addr;
	event.status = exchange(connection, &event);
	/* The end of the stream can be told only after its beginning. */
	mutex_lock(&qp->mutex);
	if (!event.status)
		event.status = begin(qp, connection, id, NULL, 0);
	id->event_handler(id, &event);
	mutex_unlock(&qp->mutex);
	/* The first message, and what the peer may have sent meanwhile. */
	rnic_stream_kick(qp);
	id->rem_ref(id);
	rnic_qp_put(&qp->base);
	free_connection(connection);
}

int rnic_connect(struct iw_cm_id *id, struct iw_cm_conn_param *param)
{
	struct rk_mpa_params params = parameters(param->ird, param->ord);
	struct rnic_qp *qp = rnic_find_qp(id->device, param->qpn);
	struct connection *connection;
	int result;

	if (!qp || id->m_remote_addr.ss_family != id->m_local_addr.ss_family)
		return -EINVAL;
	connection = kzalloc(sizeof(*connection), GFP_KERNEL);
	if (!connection)
		return -ENOMEM;
	connection->mpa = rk_mpa_new(true, &params, param->private_data, param->private_data_len);
	result = -ENOMEM;
	if (connection->mpa)
		result = make_socket(id->device, &id->m_remote_addr, &connection->socket);
	if (result) {
		connection->socket = NULL;
		free_connection(connection);
		return result;
	}
	connection->id = id;
	connection->qp = qp;
	rnic_qp_get(&qp->base);
	id->add_ref(id);
	INIT_WORK(&connection->work, connect_work);
	queue_work(rnic_waits, &connection->work);
	return 0;
}

/* ---- the responder ---- */

/* Nobody but its work has the connection from here on, until iw_cm gets it. The listener stays. */
static void no_longer_half_open(struct connection *connection)
{
	mutex_lock(&connection->listener->lock);
	list_del(&connection->entry);
	mutex_unlock(&connection->listener->lock);
}

static void leave(struct listener *listener)
{
	mutex_lock(&listener->lock);
	listener->count--;
	wake_up(&listener->changed);
	mutex_unlock(&listener->lock);
}

static void request_work(struct work_struct *work)
{
	struct connection *connection = container_of(work, struct connection, work);
	struct iw_cm_event event = {
		.event = IW_CM_EVENT_CONNECT_REQUEST,
		.provider_data = connection,
	};
	struct listener *listener = connection->listener;
	struct iw_cm_id *id = listener->id;
	struct rk_mpa_peer peer = {};
	int result = read_frame(connection, &peer);

	if (!result) {
		addresses(connection->socket, &event);
		event.private_data = (void *)peer.private_data;
		event.private_data_len = min_t(u32, peer.private_data_len, MAX_PRIVATE_DATA);
		event.ird = min_t(u16, peer.ird, U8_MAX);
		event.ord = min_t(u16, peer.ord, U8_MAX);
	} else if (result == -EPROTO) {
		/* Initiators in hardware try revision 1 only after a reset. */
		sock_no_linger(connection->socket->sk);
	}
	no_longer_half_open(connection);
	/*
	 * The listener goes only when all of these works have left it, so its identifier is still there. The connection may be accepted and
	 * freed before this call returns.
	 */
	if (!result)
		result = id->event_handler(id, &event);
	if (result)
		free_connection(connection);
	leave(listener);
}

static void add_half_open(struct listener *listener, struct socket *socket)
{
	struct rk_mpa_params params = parameters(RNIC_MAX_READS, RNIC_MAX_READS);
	struct connection *connection = kzalloc(sizeof(*connection), GFP_KERNEL);
	bool refused;

	if (!connection) {
		sock_release(socket);
		return;
	}
	connection->socket = socket;
	connection->listener = listener;
	connection->mpa = rk_mpa_new(false, &params, NULL, 0);
	socket->sk->sk_rcvtimeo = PATIENCE;
	socket->sk->sk_sndtimeo = PATIENCE;
	INIT_WORK(&connection->work, request_work);
	mutex_lock(&listener->lock);
	refused = !connection->mpa || listener->closing || listener->count >= MAX_HALF_OPEN;
	if (!refused) {
		list_add(&connection->entry, &listener->half_open);
		listener->count++;
		queue_work(rnic_waits, &connection->work);
	}
	mutex_unlock(&listener->lock);
	if (refused)
		free_connection(connection);
}

static void accept_work(struct work_struct *work)
{
	struct listener *listener = container_of(work, struct listener, work);
	struct socket *socket;

	while (!kernel_accept(listener->socket, &socket, O_NONBLOCK)) {
		/* Inherited from the listener. */
		write_lock_bh(&socket->sk->sk_callback_lock);
		socket->sk->sk_data_ready = listener->data_ready;
		socket->sk->sk_user_data = NULL;
		write_unlock_bh(&socket->sk->sk_callback_lock);
		add_half_open(listener, socket);
	}
}

static void listener_ready(struct sock *sk)
{
	struct listener *listener;

	read_lock_bh(&sk->sk_callback_lock);
	listener = sk->sk_user_data;
	/* A connection inherits this function before it is accepted. */
	if (listener && sk->sk_state == TCP_LISTEN)
		queue_work(rnic_works, &listener->work);
	read_unlock_bh(&sk->sk_callback_lock);
}

/* Whether rdma_cm asks every device for a listener at this address: everywhere, and the loopback address. */
static bool is_shared(const struct sockaddr_storage *address)
{
	const struct in6_addr *in6 = &((const struct sockaddr_in6 *)address)->sin6_addr;
	__be32 in = ((const struct sockaddr_in *)address)->sin_addr.s_addr;

	if (address->ss_family == AF_INET)
		return in == htonl(INADDR_ANY) || ipv4_is_loopback(in);
	return ipv6_addr_any(in6) || ipv6_addr_loopback(in6);
}

static int open_listener(struct listener *listener, struct iw_cm_id *id, int backlog)
{
	struct sock *sk;
	int result = make_socket(id->device, &id->m_local_addr, &listener->socket);

	if (result)
		return result;
	sk = listener->socket->sk;
	sock_set_reuseaddr(sk);
	/* Each device has a socket of its own, for what comes to that device. */
	if (is_shared(&id->m_local_addr))
		sk->sk_bound_dev_if = to_device(id->device)->netdev->ifindex;
	if (id->m_local_addr.ss_family == AF_INET6)
		ip6_sock_set_v6only(sk);
	result = kernel_bind(listener->socket, (struct sockaddr *)&id->m_local_addr,
			     address_size(&id->m_local_addr));
	if (!result) {
		write_lock_bh(&sk->sk_callback_lock);
		listener->data_ready = sk->sk_data_ready;
		sk->sk_user_data = listener;
		sk->sk_data_ready = listener_ready;
		write_unlock_bh(&sk->sk_callback_lock);
		result = kernel_listen(listener->socket, backlog);
	}
	if (result)
		sock_release(listener->socket);
	return result;
}

int rnic_create_listen(struct iw_cm_id *id, int backlog)
{
	struct listener *listener = kzalloc(sizeof(*listener), GFP_KERNEL);
	int result;

	if (!listener)
		return -ENOMEM;
	listener->id = id;
	mutex_init(&listener->lock);
	INIT_LIST_HEAD(&listener->half_open);
	init_waitqueue_head(&listener->changed);
	INIT_WORK(&listener->work, accept_work);
	result = open_listener(listener, id, backlog);
	if (result) {
		kfree(listener);
		return result;
	}
	id->add_ref(id);
	id->provider_data = listener;
	return 0;
}

int rnic_destroy_listen(struct iw_cm_id *id)
{
	struct listener *listener = id->provider_data;
	struct sock *sk = listener->socket->sk;
	struct connection *connection;

	write_lock_bh(&sk->sk_callback_lock);
	sk->sk_data_ready = listener->data_ready;
	sk->sk_user_data = NULL;
	write_unlock_bh(&sk->sk_callback_lock);
	cancel_work_sync(&listener->work);
	/* Those that wait for a request wake up, and leave. */
	mutex_lock(&listener->lock);
	listener->closing = true;
	list_for_each_entry(connection, &listener->half_open, entry)
		kernel_sock_shutdown(connection->socket, SHUT_RDWR);
	mutex_unlock(&listener->lock);
	wait_event(listener->changed, !READ_ONCE(listener->count));
	/* The last one may still hold the lock. */
	mutex_lock(&listener->lock);
	mutex_unlock(&listener->lock);
	sock_release(listener->socket);
	id->provider_data = NULL;
	kfree(listener);
	id->rem_ref(id);
	return 0;
}

int rnic_accept(struct iw_cm_id *id, struct iw_cm_conn_param *param)
{
	struct connection *connection = id->provider_data;
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
	addresses(connection->socket, &event);
	mutex_lock(&qp->mutex);
	result = begin(qp, connection, id, reply, result);
	if (!result)
		id->event_handler(id, &event);
	mutex_unlock(&qp->mutex);
	if (!result)
		rnic_stream_kick(qp);
free:
	free_connection(connection);
	return result;
}

int rnic_reject(struct iw_cm_id *id, const void *private_data, u8 octets)
{
	struct connection *connection = id->provider_data;
	const u8 *reply;
	int result;

	id->provider_data = NULL;
	result = rk_mpa_reject(connection->mpa, private_data, octets, &reply);
	if (result > 0)
		result = send_frame(connection->socket, reply, result);
	free_connection(connection);
	return result;
}
