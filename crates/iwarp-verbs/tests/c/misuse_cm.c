/* Tests of wrong calls of the connection manager: in the wrong state, with bad options, and with
 * destroyed objects. */
#include <arpa/inet.h>
#include <fcntl.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>
#include <sys/socket.h>
#include <unistd.h>

#include "check.h"

static struct rdma_event_channel *channel;

static struct sockaddr_in loopback(int port)
{
	struct sockaddr_in a = { .sin_family = AF_INET, .sin_port = htons(port) };

	a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	return a;
}

static struct rdma_cm_id *create_id(void)
{
	struct rdma_cm_id *id = NULL;

	NEED(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP) == 0);
	return id;
}

static struct rdma_cm_event *expect_event(enum rdma_cm_event_type type)
{
	struct rdma_cm_event *event = NULL;

	NEED(rdma_get_cm_event(channel, &event) == 0);
	CODE((int)type, (int)event->event);
	return event;
}

static struct ibv_qp_init_attr qp_attributes(void)
{
	struct ibv_qp_init_attr attr = {
		.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 },
		.qp_type = IBV_QPT_RC, };
	return attr;
}

static void test_new_identifier(void)
{
	struct rdma_cm_id *id = NULL;
	struct ibv_qp_init_attr attr = qp_attributes();
	struct ibv_qp_attr qp_attr = { .qp_state = IBV_QPS_INIT };
	struct rdma_conn_param param = { 0 };
	int mask;

	MINUS_ONE(EPROTONOSUPPORT, rdma_create_id(channel, &id, NULL, RDMA_PS_IPOIB));
	MINUS_ONE(EINVAL, rdma_create_id(channel, &id, NULL, 0x7777));
	id = create_id();
	MINUS_ONE(EINVAL, rdma_resolve_route(id, 1000));
	MINUS_ONE(EINVAL, rdma_connect(id, &param));
	MINUS_ONE(EINVAL, rdma_accept(id, &param));
	MINUS_ONE(EINVAL, rdma_reject(id, NULL, 0));
	MINUS_ONE(EINVAL, rdma_disconnect(id));
	MINUS_ONE(EINVAL, rdma_create_qp(id, NULL, &attr));
	MINUS_ONE(EINVAL, rdma_init_qp_attr(id, &qp_attr, &mask));
	MINUS_ONE(EINVAL, rdma_get_request(id, &id));
	MINUS_ONE(EINVAL, rdma_notify(id, IBV_EVENT_SQ_DRAINED));
	MINUS_ONE(EINVAL, rdma_join_multicast(id, NULL, NULL));
	CHECK(rdma_get_src_port(id) == 0 && rdma_get_dst_port(id) == 0);
	CODE(0, rdma_destroy_id(id));
	MINUS_ONE(EINVAL, rdma_destroy_id(id));
	MINUS_ONE(EINVAL, rdma_listen(id, 1));
	MINUS_ONE(EINVAL, rdma_destroy_id(NULL));
}

static void test_options(void)
{
	struct rdma_cm_id *id = create_id();
	int on = 1;
	uint8_t octet = 18;

	MINUS_ONE(ENOSYS, rdma_set_option(id, 99, 0, &on, sizeof(on)));
	MINUS_ONE(ENOSYS, rdma_set_option(id, RDMA_OPTION_ID, 99, &on, sizeof(on)));
	MINUS_ONE(EINVAL, rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &on, 1));
	MINUS_ONE(EINVAL, rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY, NULL, sizeof(on)));
	MINUS_ONE(EINVAL, rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &on, sizeof(on)));
	CODE(0, rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &octet, 1));
	CODE(0, rdma_destroy_id(id));
}

/* Identifiers with the option RDMA_OPTION_ID_REUSEADDR may share a port until one of them
 * listens. */
static void test_shared_addresses(void)
{
	struct rdma_cm_id *ids[3] = { create_id(), create_id(), create_id() };
	struct sockaddr_in addr = loopback(0);
	int on = 1;

	for (int i = 0; i < 2; i++) {
		CODE(0, rdma_set_option(ids[i], RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &on, sizeof(on)));
		CODE(0, rdma_bind_addr(ids[i], (struct sockaddr *)&addr));
		addr.sin_port = rdma_get_src_port(ids[i]);
	}
	CODE(0, rdma_listen(ids[0], 1));
	MINUS_ONE(EADDRINUSE, rdma_listen(ids[1], 1));
	MINUS_ONE(EADDRINUSE, rdma_bind_addr(ids[2], (struct sockaddr *)&addr));
	for (int i = 0; i < 3; i++)
		CODE(0, rdma_destroy_id(ids[i]));
}

static void test_addresses(void)
{
	struct rdma_cm_id *id = create_id(), *other = create_id();
	struct sockaddr_in addr = loopback(0), remote = loopback(0), any = loopback(0);
	struct sockaddr unix_address = { .sa_family = AF_UNIX };
	struct rdma_addrinfo hints = { .ai_flags = RAI_NUMERICHOST, .ai_port_space = RDMA_PS_TCP }, *info;

	remote.sin_addr.s_addr = inet_addr("192.0.2.254");
	any.sin_addr.s_addr = htonl(INADDR_ANY);
	MINUS_ONE(EINVAL, rdma_bind_addr(id, &unix_address));
	MINUS_ONE(EINVAL, rdma_bind_addr(id, NULL));
	MINUS_ONE(EINVAL, rdma_resolve_addr(id, NULL, NULL, 1000));
	CODE(0, rdma_bind_addr(id, (struct sockaddr *)&addr));
	MINUS_ONE(EINVAL, rdma_bind_addr(id, (struct sockaddr *)&addr));
	addr.sin_port = rdma_get_src_port(id);
	CHECK(addr.sin_port != 0);
	any.sin_port = addr.sin_port;
	MINUS_ONE(EADDRINUSE, rdma_bind_addr(other, (struct sockaddr *)&addr));
	MINUS_ONE(EADDRNOTAVAIL, rdma_bind_addr(other, (struct sockaddr *)&any));
	CODE(0, rdma_listen(id, 1));
	MINUS_ONE(EADDRINUSE, rdma_bind_addr(other, (struct sockaddr *)&addr));
	MINUS_ONE(EADDRNOTAVAIL, rdma_bind_addr(other, (struct sockaddr *)&any));
	MINUS_ONE(EADDRNOTAVAIL, rdma_bind_addr(other, (struct sockaddr *)&remote));
	/* A listener cannot connect. */
	MINUS_ONE(EINVAL, rdma_resolve_addr(id, NULL, (struct sockaddr *)&addr, 1000));
	MINUS_ONE(EINVAL, rdma_disconnect(id));
	CHECK(rdma_getaddrinfo("no such address", NULL, &hints, &info) != 0);
	CODE(0, rdma_destroy_id(other));
	CODE(0, rdma_destroy_id(id));
	test_shared_addresses();
}

static void test_connection_states(void)
{
	struct rdma_cm_id *listener = create_id(), *active = create_id(), *passive;
	struct sockaddr_in addr = loopback(0);
	struct ibv_qp_init_attr attr = qp_attributes();
	struct rdma_conn_param param = { .responder_resources = 1, .initiator_depth = 1 };
	struct rdma_conn_param greedy = { .responder_resources = 200, .initiator_depth = 1 };
	struct rdma_cm_event *event;
	int i;

	CODE(0, rdma_bind_addr(listener, (struct sockaddr *)&addr));
	CODE(0, rdma_listen(listener, 1));
	addr.sin_port = rdma_get_src_port(listener);
	CODE(0, rdma_resolve_addr(active, NULL, (struct sockaddr *)&addr, 1000));
	/* An address cannot be resolved twice, even before the program has read the event. */
	MINUS_ONE(EINVAL, rdma_resolve_addr(active, NULL, (struct sockaddr *)&addr, 1000));
	event = expect_event(RDMA_CM_EVENT_ADDR_RESOLVED);
	CODE(0, rdma_ack_cm_event(event));
	MINUS_ONE(EINVAL, rdma_ack_cm_event(event));
	CODE(0, rdma_resolve_route(active, 1000));
	CODE(0, rdma_ack_cm_event(expect_event(RDMA_CM_EVENT_ROUTE_RESOLVED)));
	MINUS_ONE(EINVAL, rdma_resolve_route(active, 1000));
	/* Connect without a queue pair, and with a queue pair number that does not exist. */
	MINUS_ONE(EINVAL, rdma_connect(active, NULL));
	param.qp_num = 0x00ffffff;
	MINUS_ONE(EINVAL, rdma_connect(active, &param));
	param.qp_num = 0;
	CODE(0, rdma_create_qp(active, NULL, &attr));
	attr = qp_attributes();
	MINUS_ONE(EINVAL, rdma_create_qp(active, NULL, &attr));
	MINUS_ONE(EINVAL, rdma_connect(active, &greedy));
	MINUS_ONE(EINVAL, rdma_accept(active, &param));
	MINUS_ONE(EINVAL, rdma_listen(active, 1));
	CODE(0, rdma_connect(active, &param));
	MINUS_ONE(EINVAL, rdma_connect(active, &param));
	event = expect_event(RDMA_CM_EVENT_CONNECT_REQUEST);
	passive = event->id;
	CHECK(event->listen_id == listener);
	CODE(0, rdma_ack_cm_event(event));
	MINUS_ONE(EINVAL, rdma_connect(passive, &param));
	MINUS_ONE(EINVAL, rdma_accept(passive, NULL));
	attr = qp_attributes();
	CODE(0, rdma_create_qp(passive, NULL, &attr));
	CODE(0, rdma_accept(passive, &param));
	MINUS_ONE(EINVAL, rdma_accept(passive, &param));
	MINUS_ONE(EINVAL, rdma_reject(passive, NULL, 0));
	for (i = 0; i < 2; i++)
		CODE(0, rdma_ack_cm_event(expect_event(RDMA_CM_EVENT_ESTABLISHED)));
	MINUS_ONE(EINVAL, rdma_establish(active));
	MINUS_ONE(EINVAL, rdma_connect(active, &param));
	CODE(0, rdma_disconnect(active));
	for (i = 0; i < 2; i++)
		CODE(0, rdma_ack_cm_event(expect_event(RDMA_CM_EVENT_DISCONNECTED)));
	MINUS_ONE(EINVAL, rdma_connect(active, &param));
	rdma_destroy_qp(active);
	rdma_destroy_qp(active);
	rdma_destroy_qp(passive);
	CODE(0, rdma_destroy_id(active));
	CODE(0, rdma_destroy_id(passive));
	CODE(0, rdma_destroy_id(listener));
	MINUS_ONE(EINVAL, rdma_destroy_id(listener));
}

static void test_endpoints(void)
{
	struct rdma_addrinfo hints = { .ai_flags = RAI_PASSIVE, .ai_port_space = RDMA_PS_TCP };
	struct rdma_addrinfo *info = NULL;
	struct rdma_cm_id *id = NULL;

	MINUS_ONE(EINVAL, rdma_create_ep(&id, NULL, NULL, NULL));
	NEED(rdma_getaddrinfo("127.0.0.1", NULL, &hints, &info) == 0);
	info->ai_qp_type = IBV_QPT_UD;
	MINUS_ONE(EOPNOTSUPP, rdma_create_ep(&id, info, NULL, NULL));
	info->ai_qp_type = IBV_QPT_RC;
	CODE(0, rdma_create_ep(&id, info, NULL, NULL));
	MINUS_ONE(EINVAL, rdma_accept(id, NULL));
	rdma_destroy_ep(id);
	rdma_freeaddrinfo(info);
	rdma_freeaddrinfo(NULL);
}

static volatile int about_to_wait;

static void *wait_for_an_event(void *arg)
{
	struct rdma_cm_event *event;

	about_to_wait = 1;
	rdma_get_cm_event(arg, &event);
	failed_(__FILE__, __LINE__, "rdma_get_cm_event", "returned after the channel was destroyed");
	return NULL;
}

/* Many programs destroy a channel while their thread waits for its events, and then exit. The
 * thread must continue to wait, because otherwise it would report an error. So
 * rdma_destroy_event_channel closes the descriptor only if no thread waits. */
static void test_destroy_channel_during_wait(void)
{
	struct rdma_event_channel *unused_channel = rdma_create_event_channel();
	pthread_t thread;
	int fd;

	NEED(unused_channel);
	fd = unused_channel->fd;
	rdma_destroy_event_channel(unused_channel);
	CHECK(fcntl(fd, F_GETFD) == -1);
	unused_channel = rdma_create_event_channel();
	NEED(unused_channel);
	fd = unused_channel->fd;
	NEED(pthread_create(&thread, NULL, wait_for_an_event, unused_channel) == 0);
	while (!about_to_wait)
		usleep(1000);
	usleep(200000);
	rdma_destroy_event_channel(unused_channel);
	CHECK(fcntl(fd, F_GETFD) != -1);
	usleep(50000);
}

int main(void)
{
	channel = rdma_create_event_channel();
	NEED(channel);
	test_new_identifier();
	test_options();
	test_addresses();
	test_connection_states();
	test_endpoints();
	rdma_destroy_event_channel(channel);
	test_destroy_channel_during_wait();
	return result();
}
