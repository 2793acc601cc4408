// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * Listeners, and their connections until iw_cm is notified of the peer's request. cm.c explains
 * what a turn is, and in which order turns run.
 *
 * A connection is half open until its request is complete. A listener is freed after its last
 * half-open connection.
 */
#include <linux/slab.h>
#include <net/inet_connection_sock.h>

#include "cm.h"

/* Maximum number of half-open connections of a listener. The next one evicts the oldest. */
#define MAX_HALF_OPEN 128

struct listener {
	struct iw_cm_id *id;
	struct socket *socket;
	void (*data_ready)(struct sock *sk);
	struct work_struct work;
	/* Guards the list of half-open connections. */
	struct mutex lock;
	struct list_head half_open;
	unsigned int count;
	bool closing;
	wait_queue_head_t count_changed;
};

/* ---- requests ---- */

/*
 * Removes the connection from the listener's list. From now on, only this turn uses the connection,
 * until iw_cm gets it. The listener stays valid, because `count` still includes the connection.
 */
static void remove_half_open(struct rnic_connection *connection)
{
	mutex_lock(&connection->listener->lock);
	list_del(&connection->entry);
	mutex_unlock(&connection->listener->lock);
	rnic_unwatch(connection);
}

/* Removes a connection from the listener's count, and lets the listener accept another one. */
static void release_half_open(struct listener *listener)
{
	mutex_lock(&listener->lock);
	listener->count--;
	if (!listener->closing)
		queue_work(rnic_cm_wq, &listener->work);
	wake_up(&listener->count_changed);
	mutex_unlock(&listener->lock);
}

static void request_turn(struct work_struct *work)
{
	struct rnic_connection *connection = container_of(work, struct rnic_connection, work);
	struct iw_cm_event event = {
		.event = IW_CM_EVENT_CONNECT_REQUEST,
		.provider_data = connection,
	};
	struct listener *listener = connection->listener;
	struct iw_cm_id *id = listener->id;
	struct rk_mpa_peer peer = {};
	int result = -ECONNABORTED;

	if (!READ_ONCE(listener->closing))
		result = rnic_check_time_limit(connection, rnic_read_frame(connection, &peer));
	if (result == -EAGAIN && connection->evicted)
		result = -ETIMEDOUT;
	if (result == -EAGAIN)
		return;
	remove_half_open(connection);
	if (!result) {
		rnic_describe_peer(connection, &peer, &event);
		event.ird = min_t(u16, peer.ird, U8_MAX);
		event.ord = min_t(u16, peer.ord, U8_MAX);
		/*
		 * `count` still includes the connection, so the listener and its identifier are
		 * valid. The connection may be accepted and freed before the call returns.
		 */
		result = id->event_handler(id, &event);
	} else if (result == -EPROTO) {
		/* Send a reset: RNICs try MPA revision 1 only after a reset. */
		connection->reset = true;
	}
	if (result)
		rnic_connection_free(connection);
	release_half_open(listener);
}

static void add_half_open(struct listener *listener, struct socket *socket)
{
	struct rk_mpa_params params = rnic_mpa_params(RNIC_MAX_READS, RNIC_MAX_READS);
	struct rnic_connection *connection;
	bool refused;

	connection = rnic_connection_new(rk_mpa_new(false, &params, NULL, 0, ktime_get_ns()),
					 request_turn);
	if (!connection) {
		rnic_close_socket(socket, true);
		return;
	}
	connection->socket = socket;
	connection->listener = listener;
	mutex_lock(&listener->lock);
	refused = listener->closing;
	if (!refused) {
		list_add(&connection->entry, &listener->half_open);
		listener->count++;
		rnic_watch(connection, TCP_ESTABLISHED);
	}
	mutex_unlock(&listener->lock);
	if (refused)
		rnic_connection_free(connection);
}

/*
 * Closes the oldest half-open connection, so that silent peers cannot block the listener. A turn of
 * that connection closes it.
 */
static void evict_oldest(struct listener *listener)
{
	struct rnic_connection *oldest;

	mutex_lock(&listener->lock);
	if (!list_empty(&listener->half_open)) {
		oldest = list_last_entry(&listener->half_open, struct rnic_connection, entry);
		oldest->evicted = true;
		queue_work(rnic_cm_wq, &oldest->work);
	}
	mutex_unlock(&listener->lock);
}

/*
 * Accepts one connection, and queues another turn for the next. So the turns of connections whose
 * request has arrived run before many more connections become half open.
 */
static void accept_turn(struct work_struct *work)
{
	struct listener *listener = container_of(work, struct listener, work);
	struct socket *socket;

	/* The count changes only in turns of this queue. */
	if (listener->count >= MAX_HALF_OPEN) {
		if (!reqsk_queue_empty(&inet_csk(listener->socket->sk)->icsk_accept_queue))
			evict_oldest(listener);
		return;
	}
	if (kernel_accept(listener->socket, &socket, O_NONBLOCK))
		return;
	write_lock_bh(&socket->sk->sk_callback_lock);
	socket->sk->sk_data_ready = listener->data_ready;
	socket->sk->sk_user_data = NULL;
	write_unlock_bh(&socket->sk->sk_callback_lock);
	add_half_open(listener, socket);
	queue_work(rnic_cm_wq, &listener->work);
}

/* ---- listeners ---- */

static void listener_ready(struct sock *sk)
{
	struct listener *listener;

	read_lock_bh(&sk->sk_callback_lock);
	listener = sk->sk_user_data;
	/* A connection inherits this callback before it is accepted. */
	if (listener && sk->sk_state == TCP_LISTEN)
		queue_work(rnic_cm_wq, &listener->work);
	read_unlock_bh(&sk->sk_callback_lock);
}

/*
 * Returns true if rdma_cm creates a listener for this address on every device: the wildcard and
 * loopback addresses.
 */
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
	int result = rnic_create_socket(id->device, &id->m_local_addr, &listener->socket);

	if (result)
		return result;
	sk = listener->socket->sk;
	sock_set_reuseaddr(sk);
	/* Each device has its own socket, for connections to that device. */
	if (is_shared(&id->m_local_addr))
		sk->sk_bound_dev_if = to_device(id->device)->netdev->ifindex;
	if (id->m_local_addr.ss_family == AF_INET6 && id->afonly)
		ip6_sock_set_v6only(sk);
	result = kernel_bind(listener->socket, (rnic_sockaddr *)&id->m_local_addr,
			     rnic_address_size(&id->m_local_addr));
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
	struct listener *listener = kzalloc(sizeof(*listener), RNIC_GFP);
	int result;

	if (!listener)
		return -ENOMEM;
	listener->id = id;
	mutex_init(&listener->lock);
	INIT_LIST_HEAD(&listener->half_open);
	init_waitqueue_head(&listener->count_changed);
	INIT_WORK(&listener->work, accept_turn);
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
	struct rnic_connection *connection;

	write_lock_bh(&sk->sk_callback_lock);
	sk->sk_data_ready = listener->data_ready;
	sk->sk_user_data = NULL;
	write_unlock_bh(&sk->sk_callback_lock);
	/* Half-open connections end in turns of their own. */
	mutex_lock(&listener->lock);
	WRITE_ONCE(listener->closing, true);
	list_for_each_entry(connection, &listener->half_open, entry)
		queue_work(rnic_cm_wq, &connection->work);
	mutex_unlock(&listener->lock);
	cancel_work_sync(&listener->work);
	wait_event(listener->count_changed, !READ_ONCE(listener->count));
	/* The turn of the last connection may still hold the lock. */
	mutex_lock(&listener->lock);
	mutex_unlock(&listener->lock);
	sock_release(listener->socket);
	id->provider_data = NULL;
	kfree(listener);
	id->rem_ref(id);
	return 0;
}
