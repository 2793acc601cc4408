/* Tests of identifiers for datagrams: contents of events, synchronous calls, multicast groups, and
 * errors. */

#include "check.h"
#include <arpa/inet.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>
#include <unistd.h>

#define QKEY 0x01234567u
#define GRH 40

static struct rdma_event_channel *channel;

static struct sockaddr_in loopback(unsigned short port)
{
	return (struct sockaddr_in){ .sin_family = AF_INET, .sin_port = port,
		.sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
}

static struct rdma_cm_event *next_event(enum rdma_cm_event_type type)
{
	struct rdma_cm_event *event = NULL;

	CODE(0, rdma_get_cm_event(channel, &event));
	NEED(event->event == type);
	return event;
}

static struct ibv_qp_init_attr default_attributes(enum ibv_qp_type type)
{
	return (struct ibv_qp_init_attr){
		.qp_type = type, .cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1,
			.max_recv_sge = 1 }, .sq_sig_all = 1
	};
}

/* Creates an identifier's queue pair, which is in RTS and has the connection manager's Q_Key. */
static void create_qp(struct rdma_cm_id *id)
{
	struct ibv_qp_init_attr init = default_attributes(IBV_QPT_RC), was;
	struct ibv_qp_attr attr;

	MINUS_ONE(EINVAL, rdma_create_qp(id, NULL, &init));
	init = default_attributes(IBV_QPT_UD);
	CODE(0, rdma_create_qp(id, NULL, &init));
	CODE(0, ibv_query_qp(id->qp, &attr, IBV_QP_STATE | IBV_QP_QKEY, &was));
	NEED(attr.qp_state == IBV_QPS_RTS && attr.qkey == QKEY && was.qp_type == IBV_QPT_UD);
}

static struct rdma_cm_id *create_resolved_id(struct sockaddr_in to)
{
	struct rdma_cm_id *id;

	CODE(0, rdma_create_id(channel, &id, &to, RDMA_PS_UDP));
	NEED(id->qp_type == IBV_QPT_UD && id->ps == RDMA_PS_UDP);
	CODE(0, rdma_resolve_addr(id, NULL, (struct sockaddr *)&to, 2000));
	CODE(0, rdma_ack_cm_event(next_event(RDMA_CM_EVENT_ADDR_RESOLVED)));
	CODE(0, rdma_resolve_route(id, 2000));
	CODE(0, rdma_ack_cm_event(next_event(RDMA_CM_EVENT_ROUTE_RESOLVED)));
	return id;
}

/* Sends a message from `a` to the destination `to`, which is the queue pair of `b`. */
static void exchange(struct rdma_cm_id *a, struct rdma_cm_id *b, struct rdma_ud_param *to)
{
	char text[64] = "question", into[GRH + 64];
	struct ibv_mr *from = rdma_reg_msgs(a, text, sizeof(text)),
		*mr = rdma_reg_msgs(b, into, sizeof(into));
	struct ibv_ah *ah = ibv_create_ah(a->pd, &to->ah_attr);
	struct ibv_wc wc;

	NEED(from && mr && ah);
	CODE(0, rdma_post_recv(b, NULL, into, sizeof(into), mr));
	CODE(0, rdma_post_ud_send(a, NULL, text, sizeof(text), from, IBV_SEND_SIGNALED, ah, to->qp_num));
	CODE(1, rdma_get_send_comp(a, &wc));
	CODE(1, rdma_get_recv_comp(b, &wc));
	NEED(wc.status == IBV_WC_SUCCESS && wc.byte_len == sizeof(into) && wc.src_qp == a->qp->qp_num);
	NEED(!memcmp(into + GRH, text, sizeof(text)));
	CODE(0, ibv_destroy_ah(ah));
	CODE(0, rdma_dereg_mr(from));
	CODE(0, rdma_dereg_mr(mr));
}

static void test_accepted_request(struct sockaddr_in addr)
{
	struct rdma_conn_param param = { .private_data = "hello", .private_data_len = 6 };
	unsigned char tos = 0x48;
	struct rdma_cm_id *id = create_resolved_id(addr), *server;
	struct rdma_cm_event *event, *request;
	struct rdma_ud_param *ud;

	create_qp(id);
	CODE(0, rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &tos, 1));
	param.private_data_len = 181;
	MINUS_ONE(EINVAL, rdma_connect(id, &param));
	param.private_data_len = 6;
	CODE(0, rdma_connect(id, &param));
	request = next_event(RDMA_CM_EVENT_CONNECT_REQUEST);
	server = request->id;
	ud = &request->param.ud;
	NEED(ud->private_data_len == 6 && !memcmp(ud->private_data, "hello", 6));
	NEED(server != request->listen_id && server->qp_type == IBV_QPT_UD && server->verbs && server->pd);
	CODE(0, rdma_ack_cm_event(request));
	MINUS_ONE(EINVAL, rdma_accept(server, NULL));
	create_qp(server);
	param.private_data = "world";
	CODE(0, rdma_accept(server, &param));
	MINUS_ONE(EINVAL, rdma_accept(server, &param));
	event = next_event(RDMA_CM_EVENT_ESTABLISHED);
	ud = &event->param.ud;
	NEED(event->id == id && event->status == 0 && ud->qp_num == server->qp->qp_num &&
		ud->qkey == QKEY);
	NEED(ud->private_data_len == 6 && !memcmp(ud->private_data, "world", 6));
	NEED(ud->ah_attr.is_global && ud->ah_attr.port_num == 1 && ud->ah_attr.grh.traffic_class == tos);
	exchange(id, server, ud);
	CODE(0, rdma_ack_cm_event(event));
	MINUS_ONE(EINVAL, rdma_disconnect(id));
	rdma_destroy_qp(server);
	rdma_destroy_qp(id);
	CODE(0, rdma_destroy_id(server));
	CODE(0, rdma_destroy_id(id));
}

/* The status of a rejected request is InfiniBand's code. */
static void test_rejected_request(struct sockaddr_in addr)
{
	struct rdma_conn_param param = { 0 };
	struct rdma_cm_id *id = create_resolved_id(addr);
	struct rdma_cm_event *event;

	CODE(0, rdma_connect(id, &param));
	event = next_event(RDMA_CM_EVENT_CONNECT_REQUEST);
	CODE(0, rdma_reject(event->id, "no", 3));
	CODE(0, rdma_destroy_id(event->id));
	CODE(0, rdma_ack_cm_event(event));
	event = next_event(RDMA_CM_EVENT_UNREACHABLE);
	NEED(event->status == 2 && event->param.ud.private_data_len == 3 &&
		!memcmp(event->param.ud.private_data, "no", 3));
	CODE(0, rdma_ack_cm_event(event));
	CODE(0, rdma_destroy_id(id));
	/* If the identifier has no queue pair, the reply contains the number in the parameters. */
	id = create_resolved_id(addr);
	CODE(0, rdma_connect(id, &param));
	event = next_event(RDMA_CM_EVENT_CONNECT_REQUEST);
	param.qp_num = 0x123456;
	CODE(0, rdma_accept(event->id, &param));
	CODE(0, rdma_destroy_id(event->id));
	CODE(0, rdma_ack_cm_event(event));
	event = next_event(RDMA_CM_EVENT_ESTABLISHED);
	NEED(event->param.ud.qp_num == 0x123456 && event->param.ud.qkey == QKEY);
	CODE(0, rdma_ack_cm_event(event));
	CODE(0, rdma_destroy_id(id));
}

static void test_other_port_spaces(void)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT };
	struct sockaddr_in addr = loopback(0);
	struct rdma_cm_id *id;
	int mask;

	MINUS_ONE(EPROTONOSUPPORT, rdma_create_id(channel, &id, NULL, RDMA_PS_IPOIB));
	MINUS_ONE(EPROTONOSUPPORT, rdma_create_id(NULL, &id, NULL, RDMA_PS_IPOIB));
	CODE(0, rdma_create_id(channel, &id, NULL, RDMA_PS_TCP));
	CODE(0, rdma_bind_addr(id, (struct sockaddr *)&addr));
	MINUS_ONE(EINVAL, rdma_join_multicast(id, (struct sockaddr *)&addr, NULL));
	MINUS_ONE(EINVAL, rdma_leave_multicast(id, (struct sockaddr *)&addr));
	CODE(0, rdma_destroy_id(id));
	addr.sin_port = 0;
	CODE(0, rdma_create_id(channel, &id, NULL, RDMA_PS_UDP));
	CODE(0, rdma_bind_addr(id, (struct sockaddr *)&addr));
	CODE(0, rdma_init_qp_attr(id, &attr, &mask));
	NEED(mask == (IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY) && attr.qkey == QKEY &&
		attr.port_num == 1);
	CODE(0, rdma_destroy_id(id));
}

static struct sockaddr_in group = { .sin_family = AF_INET };

static void test_multicast(void)
{
	struct sockaddr_in addr = loopback(0), none = loopback(0);
	struct rdma_cm_join_mc_attr_ex ex = { .comp_mask = RDMA_CM_JOIN_MC_ATTR_ADDRESS,
		.addr = (struct sockaddr *)&group };
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;
	struct rdma_ud_param ud;
	int context;

	group.sin_addr.s_addr = htonl(0xefff4d11);
	CODE(0, rdma_create_id(channel, &id, NULL, RDMA_PS_UDP));
	CODE(0, rdma_resolve_addr(id, (struct sockaddr *)&addr, (struct sockaddr *)&group, 2000));
	CODE(0, rdma_ack_cm_event(next_event(RDMA_CM_EVENT_ADDR_RESOLVED)));
	MINUS_ONE(EINVAL, rdma_join_multicast(id, (struct sockaddr *)&none, &context));
	MINUS_ONE(EINVAL, rdma_join_multicast_ex(id, &ex, &context));
	ex.comp_mask = 7;
	MINUS_ONE(EOPNOTSUPP, rdma_join_multicast_ex(id, &ex, &context));
	MINUS_ONE(EADDRNOTAVAIL, rdma_leave_multicast(id, (struct sockaddr *)&group));
	create_qp(id);
	CODE(0, rdma_join_multicast(id, (struct sockaddr *)&group, &context));
	event = next_event(RDMA_CM_EVENT_MULTICAST_JOIN);
	ud = event->param.ud;
	NEED(event->id == id && event->status == 0 && ud.private_data == &context);
	NEED(ud.qp_num == 0xffffff && ud.qkey == QKEY && ud.ah_attr.is_global);
	NEED(!memcmp(ud.ah_attr.grh.dgid.raw + 12, &group.sin_addr, 4) &&
		ud.ah_attr.grh.dgid.raw[10] == 0xff);
	CODE(0, rdma_ack_cm_event(event));
	exchange(id, id, &ud);
	/* Leaving a group discards its pending event. */
	ex.comp_mask = RDMA_CM_JOIN_MC_ATTR_ADDRESS | RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS;
	ex.join_flags = RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER;
	CODE(0, rdma_join_multicast_ex(id, &ex, NULL));
	CODE(0, rdma_leave_multicast(id, (struct sockaddr *)&group));
	CODE(0, rdma_leave_multicast(id, (struct sockaddr *)&group));
	MINUS_ONE(EADDRNOTAVAIL, rdma_leave_multicast(id, (struct sockaddr *)&group));
	NEED(ibv_detach_mcast(id->qp, &ud.ah_attr.grh.dgid, 0) == EINVAL);
	rdma_destroy_qp(id);
	CODE(0, rdma_destroy_id(id));
}

/* Leaving a group discards its pending event. Events of other groups have the user data of their
 * join. */
static void test_several_groups(void)
{
	struct sockaddr_in addr = loopback(0), to[3];
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;
	int context[3], left_group, i;

	for (left_group = 0; left_group < 3; left_group++) {
		CODE(0, rdma_create_id(channel, &id, NULL, RDMA_PS_UDP));
		for (i = 0; i < 3; i++) {
			to[i] = group;
			to[i].sin_addr.s_addr = htonl(0xefff4d20 + i);
		}
		CODE(0, rdma_resolve_addr(id, (struct sockaddr *)&addr, (struct sockaddr *)&to[0], 2000));
		CODE(0, rdma_ack_cm_event(next_event(RDMA_CM_EVENT_ADDR_RESOLVED)));
		create_qp(id);
		for (i = 0; i < 3; i++)
			CODE(0, rdma_join_multicast(id, (struct sockaddr *)&to[i], &context[i]));
		CODE(0, rdma_leave_multicast(id, (struct sockaddr *)&to[left_group]));
		for (i = 0; i < 3; i++) {
			if (i == left_group)
				continue;
			event = next_event(RDMA_CM_EVENT_MULTICAST_JOIN);
			CHECK(event->param.ud.private_data == &context[i]);
			CHECK(!memcmp(event->param.ud.ah_attr.grh.dgid.raw + 12, &to[i].sin_addr, 4));
			CODE(0, rdma_ack_cm_event(event));
		}
		for (i = 0; i < 3; i++)
			if (i != left_group)
				CODE(0, rdma_leave_multicast(id, (struct sockaddr *)&to[i]));
		rdma_destroy_qp(id);
		CODE(0, rdma_destroy_id(id));
	}
}

static void *serve(void *arg)
{
	struct rdma_cm_id *listener = arg, *id;

	CODE(0, rdma_get_request(listener, &id));
	NEED(id->qp && id->qp->qp_type == IBV_QPT_UD);
	CODE(0, rdma_accept(id, NULL));
	NEED(!id->event);
	rdma_destroy_ep(id);
	CODE(0, rdma_get_request(listener, &id));
	CODE(0, rdma_reject(id, NULL, 0));
	rdma_destroy_ep(id);
	return NULL;
}

static void test_synchronous_calls(void)
{
	struct rdma_addrinfo hints = { .ai_port_space = RDMA_PS_UDP, .ai_flags = RAI_PASSIVE }, *peer_info,
		*listen_info;
	struct ibv_qp_init_attr init = default_attributes(IBV_QPT_RC);
	struct rdma_cm_id *listener, *id;
	pthread_t thread;
	char port[8];

	CODE(0, rdma_getaddrinfo("127.0.0.1", "0", &hints, &listen_info));
	NEED(listen_info->ai_qp_type == IBV_QPT_UD);
	CODE(0, rdma_create_ep(&listener, listen_info, NULL, &init));
	CODE(0, rdma_listen(listener, 0));
	sprintf(port, "%d", ntohs(rdma_get_src_port(listener)));
	CODE(0, pthread_create(&thread, NULL, serve, listener));
	hints.ai_flags = 0;
	CODE(0, rdma_getaddrinfo("127.0.0.1", port, &hints, &peer_info));
	for (int good = 1; good >= 0; good--) {
		init = default_attributes(IBV_QPT_RC);
		CODE(0, rdma_create_ep(&id, peer_info, NULL, &init));
		NEED(id->qp->qp_type == IBV_QPT_UD);
		CODE(good - 1, rdma_connect(id, NULL));
		NEED(good || errno == ECONNREFUSED);
		NEED(id->event->event == (good ? RDMA_CM_EVENT_ESTABLISHED : RDMA_CM_EVENT_UNREACHABLE));
		rdma_destroy_ep(id);
	}
	CODE(0, pthread_join(thread, NULL));
	rdma_destroy_ep(listener);
	rdma_freeaddrinfo(listen_info);
	rdma_freeaddrinfo(peer_info);
}

int main(void)
{
	struct sockaddr_in addr = loopback(0);
	struct rdma_cm_id *listener;

	alarm(40);
	channel = rdma_create_event_channel();
	NEED(channel);
	CODE(0, rdma_create_id(channel, &listener, NULL, RDMA_PS_UDP));
	CODE(0, rdma_bind_addr(listener, (struct sockaddr *)&addr));
	CODE(0, rdma_listen(listener, 0));
	addr.sin_port = rdma_get_src_port(listener);
	test_accepted_request(addr);
	test_rejected_request(addr);
	CODE(0, rdma_destroy_id(listener));
	test_other_port_spaces();
	test_multicast();
	test_several_groups();
	test_synchronous_calls();
	rdma_destroy_event_channel(channel);
	return result();
}
