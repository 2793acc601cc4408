/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* Connections until their queue pair is started: shared by cm.c and listen.c. */
#ifndef IWARP_RNIC_CM_H
#define IWARP_RNIC_CM_H

#include <net/sock.h>
#include <rdma/iw_cm.h>

#include "rnic.h"

struct listener;

struct rnic_connection {
	/* The connection's next turn (see cm.c), queued on `rnic_cm_wq`. */
	struct work_struct work;
	/* Queues a turn when a time limit expires. */
	struct timer_list timer;
	struct socket *socket;
	/* The callbacks that rnic_watch() has replaced, and that rnic_unwatch() restores. */
	void (*data_ready)(struct sock *sk);
	void (*state_change)(struct sock *sk);
	struct rk_mpa *mpa;
	/* Reset the TCP connection when the connection is freed. */
	bool reset;
	/* Initiators only. */
	struct iw_cm_id *id;
	struct rnic_qp *qp;
	bool requested;
	/* Responders only, until iw_cm is notified. */
	struct listener *listener;
	struct list_head entry;
	/* The next turn closes the connection, to make room, unless its request has arrived. */
	bool evicted;
};

struct rk_mpa_params rnic_mpa_params(u32 ird, u32 ord);
size_t rnic_address_size(const struct sockaddr_storage *address);

/*
 * Creates a connection without a socket. It owns `mpa` from now on; on failure, `mpa` is freed.
 * Fails if `mpa` is NULL.
 */
struct rnic_connection *rnic_connection_new(struct rk_mpa *mpa, work_func_t turn);
void rnic_connection_free(struct rnic_connection *connection);

void rnic_watch(struct rnic_connection *connection, int expected_state);
void rnic_unwatch(struct rnic_connection *connection);
void rnic_set_timer(struct rnic_connection *connection);
int rnic_check_time_limit(struct rnic_connection *connection, int result);

int rnic_read_frame(struct rnic_connection *connection, struct rk_mpa_peer *peer);
void rnic_describe_peer(const struct rnic_connection *connection, const struct rk_mpa_peer *peer,
			struct iw_cm_event *event);

#endif
